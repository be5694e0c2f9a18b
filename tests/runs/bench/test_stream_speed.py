"""The figures of the benchmark are ratios of what ran side by side."""

from streamh2o.runs.bench.stream_speed import Timing, bench, ratio, share
from tests import tiny


def test_a_ratio_is_the_median_over_rounds_of_speed_per_token():
    slow, fast = Timing("slow", 10, (1.0, 2.0, 4.0)), Timing("fast", 20, (1.0, 1.0, 1.0))
    assert slow.tokens_per_second == 5
    assert ratio(fast, slow) == 4  # of 2, 4 and 8
    assert ratio(slow, fast) == 0.25
    assert share(slow, fast) == 4  # what takes four times as long


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
        "streamh2o, cache 32, evict token",
        "streamh2o, cache 32, chunk 1",
        "h2o, cache 32, evict token",
        "h2o, cache 32, chunk 1",
        "dense pass over one chunk",
    ]
    assert all(run["tokens_per_second"] > 0 and run["of_limit"] > 0 for run in result["runs"])
    assert result["runs"][0]["of_limit"] == 1
    assert len(result["stages"]) == 5
    assert [gain["policy"] for gain in result["evict_token"]] == ["streamh2o", "h2o"]
    assert model.config._attn_implementation == before
