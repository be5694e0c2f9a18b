"""What the benchmark of streams times, and that the model is its own afterwards."""

from streamh2o.runs.bench import stream_speed
from streamh2o.runs.bench.stream_speed import bench
from tests import tiny


def test_every_contestant_and_stage_is_timed_and_the_model_is_given_back():
    model = tiny.llama()
    before = model.config._attn_implementation
    result = bench(model, tiny.tokens(200), caches=(32, 64), policies=("streamh2o", "h2o"), chunk=16, rounds=2)
    names = [run["name"] for run in result["runs"]]
    assert names == [
        "linear layers alone",
        "streamh2o, cache 32",
        "h2o, cache 32",
        "streamh2o, cache 64",
        "h2o, cache 64",
        "window of 32 recomputed",
        "streamh2o, cache 32, without the engine",
        "streamh2o, cache 32, evict token",
        "streamh2o, cache 32, chunk 1",
        "h2o, cache 32, evict token",
        "h2o, cache 32, chunk 1",
        "dense pass over one chunk",
    ]
    assert all(run["tokens_per_second"] > 0 and run["of_limit"] > 0 for run in result["runs"])
    assert result["runs"][0]["of_limit"] == 1
    assert len(result["stages"]) == 5
    assert result["engine"]["of"] == "streamh2o, cache 32"
    assert result["engine"]["ratio"] > 0
    assert [gain["policy"] for gain in result["evict_token"]] == ["streamh2o", "h2o"]
    assert model.config._attn_implementation == before


def test_one_stream_is_timed_without_the_engine(monkeypatch):
    made = []

    class Recorded(stream_speed.WarmStream):
        def __init__(self, *args, engine=True, **how):
            super().__init__(*args, engine=engine, **how)
            made.append(self.stream.engine)

    monkeypatch.setattr(stream_speed, "WarmStream", Recorded)
    bench(tiny.llama(), tiny.tokens(100), caches=(32,), policies=("h2o",), chunk=16, rounds=1)
    assert made.count(False) == 1
