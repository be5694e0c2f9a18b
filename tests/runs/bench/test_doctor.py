import re

import pytest
import torch

from streamh2o.models.load import load_model
from streamh2o.runs.bench import doctor
from tests.tiny_folder import make_folder

PLACE = ("--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def some_model_is_at_hand(monkeypatch, model):
    from streamh2o.models.find import ModelAtHand

    monkeypatch.setattr("streamh2o.models.find.list_models", lambda: [ModelAtHand(model, "named", True, 1, "")])


def lines(out: str) -> dict[str, list[tuple[str, str]]]:
    """Per check, what it found: the verdict and the sentence."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in out.splitlines()[:-1]:
        verdict, what, sentence = re.fullmatch(r"(ok   |WRONG) ([\w-]+): +(.+)", line).groups()
        found.setdefault(what, []).append((verdict.strip(), sentence))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_machine_has_one_line_a_check_and_code_0(streamh2o, model, dtype):
    code, out, err = streamh2o("doctor", "--model", model, "--dtype", dtype, *PLACE)
    found = lines(out)
    assert (code, err) == (0, ""), out
    assert {"python", "torch", "transformers", "tokenizers", "threads", "models", "device", "dtype", "model"} <= set(
        found
    )
    assert found["torch"] == [("ok", f"{torch.__version__}, supported: >=2.6")]
    assert len(found["losses"]) == 2
    assert found["device"] == [("ok", "cpu, as asked for")]
    assert out.endswith("All is well.\n")


def test_losses_that_differ_between_chunks_are_wrong(streamh2o, model, monkeypatch):
    from streamh2o.stream.chunk_stream import ChunkStream

    feed = ChunkStream.feed

    def biased(stream, ids):
        fed = feed(stream, ids)
        return fed if ids.shape[1] == 1 else type(fed)(fed.losses + 0.01, fed.hidden)

    monkeypatch.setattr(ChunkStream, "feed", biased)
    code, out, _ = streamh2o("doctor", "--model", model, "--dtype", "float32", *PLACE)
    assert code == 1
    assert [verdict for verdict, _ in lines(out)["losses"]] == ["WRONG", "WRONG"]
    assert "1.0e-02 nats apart" in out
    assert out.endswith("2 of these are wrong.\n")


def test_a_library_outside_its_range_and_a_missing_one_are_wrong(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy<1", "nothing-such>=1", "rich; extra=='x'"])
    found = list(doctor.check_versions())
    assert [(finding.what, finding.good) for finding in found[1:]] == [("numpy", False), ("nothing-such", False)]
    assert "pip install 'nothing-such>=1'" in found[2].line


def test_a_model_that_is_not_there_is_wrong_and_the_rest_is_still_checked(streamh2o, tmp_path):
    code, out, _ = streamh2o("doctor", "--model", tmp_path / "none.gguf", *PLACE)
    assert code == 1
    assert lines(out)["model"][0][0] == "WRONG"
    assert "losses" not in lines(out)
    assert out.endswith("1 of these is wrong.\n")


def test_a_cache_that_does_not_fit_is_wrong(model, monkeypatch):
    monkeypatch.setattr("streamh2o.cache.memory_check.available_bytes", lambda: 1000)
    (finding,) = doctor.check_memory(load_model(model, dtype="float32", device="cpu", selftest=False))
    assert not finding.good
    assert "1.0 kB free, a cache of 256 takes 155.6 kB" in finding.line
