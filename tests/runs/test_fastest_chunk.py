"""`--chunk auto`: a chunk that fits, found by running, and nothing of the trial left behind."""

import json

import pytest

from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs import fastest_chunk as trial
from streamh2o.runs.options import RunOptions, open_stream
from tests import tiny
from tests.call import one_sentence
from tests.tiny_folder import make_book, make_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("evict", ["chunk", "token"])
@pytest.mark.parametrize(("policy", "cache"), [("streamh2o", 400), ("streamingllm", 20), ("full", 100)])
def test_it_is_one_of_those_that_fit(model, policy, cache, evict):
    loaded = load_model(str(model), dtype="float32")
    assert loaded.trained_positions == 512
    before = loaded.model.config._attn_implementation
    found = trial.fastest_chunk(loaded, make_policy(policy, cache), RunOptions(evict=evict))
    assert found in {400: (64,), 20: (64, 128, 256), 100: (64, 128)}[cache]
    assert loaded.model.config._attn_implementation == before


def test_a_cache_is_filled_to_its_budget_and_evicts(model):
    loaded = load_model(str(model), dtype="float32")
    with open_stream(loaded, make_policy("h2o", 50), RunOptions(chunk=8)) as stream:
        stream.feed(tiny.tokens(8))
        trial._fill(stream)
        assert stream.slots == 50
        stream.feed(tiny.tokens(8))
        assert (stream.slots, stream.evictions) == (50, 1)


def test_on_the_command_line_it_is_said_and_recorded(streamh2o, model, tmp_path):
    book = make_book(tmp_path)
    code, out, err = streamh2o("ppl", book, "--model", model, "--cache", 32, "--chunk", "auto", "--json", "-")
    assert code == 0
    chunk = json.loads(out)["chunk"]
    assert f"chunk: {chunk}, the fastest" in err
    same = streamh2o("ppl", book, "--model", model, "--cache", 32, "--chunk", chunk, "--json", "-")[1]
    assert json.loads(same)["nll_sum"] == json.loads(out)["nll_sum"]


@pytest.mark.parametrize(
    ("options", "said"), [(("--chunk", "some"), "or auto"), (("--chunk", "auto"), "give a number")]
)
def test_what_it_cannot_be_is_one_sentence(streamh2o, model, tmp_path, options, said):
    code, _, err = streamh2o("ppl", make_book(tmp_path), "--model", model, *options, "--checkpoint", tmp_path / "kept")
    assert code == 2
    assert said in one_sentence(err)
