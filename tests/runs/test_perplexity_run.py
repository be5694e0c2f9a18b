import json
import math

import numpy as np
import pytest
import torch

from streamh2o.cache.slot_cache import SlotCache
from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.text import open_inputs
from tests.perplexity import RunFailed, run_perplexity
from tests.tiny import dense_losses
from tests.tiny_folder import TEXT, make_folder

POLICY = make_policy("streamh2o", cache=64)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{number}. {TEXT}" for number in range(12)))
    return path


def source(path):
    return open_inputs([path])[0]


def test_the_result_is_that_of_plain_transformers_while_nothing_is_evicted(loaded, book):
    losses = []
    result = run_perplexity(
        loaded,
        source(book),
        make_policy("streamh2o", cache=400),
        RunOptions(chunk=32, max_tokens=300),
        [lambda progress: losses.append(progress.losses)],
    )
    ids = torch.tensor([loaded.tokenizer(book.read_text(), add_special_tokens=False).input_ids[:300]])
    expected = dense_losses(loaded.model, ids)[0].double()
    assert result["evictions"] == 0
    assert np.concatenate(losses) == pytest.approx(expected.numpy(), abs=1e-4)
    assert result["nll_sum"] == pytest.approx(float(expected.sum()), rel=1e-6)
    assert result["ppl"] == pytest.approx(math.exp(float(expected.mean())), rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_one_loss_less_than_tokens_whatever_the_chunk(loaded, book, chunk):
    result = run_perplexity(loaded, source(book), POLICY, RunOptions(chunk=chunk, max_tokens=200))
    assert (result["tokens"], result["scored"], result["complete"]) == (200, 199, True)
    assert result["evictions"] > 0
    assert result["max_slots"] == 64


def test_with_a_bos_every_token_is_scored(tmp_path, book):
    loaded = load_model(str(make_folder(tmp_path, bos=True)), dtype="float32", device="cpu")
    for bos, scored in (("auto", 200), ("no", 199)):
        result = run_perplexity(loaded, source(book), POLICY, RunOptions(max_tokens=200, bos=bos))
        assert (result["tokens"], result["scored"], result["bos"]) == (200, scored, scored == 200)


def test_the_result_describes_the_whole_input_and_survives_json(loaded, book):
    import hashlib

    text = book.read_bytes()
    result = run_perplexity(loaded, source(book), POLICY)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["input"] == {
        "name": str(book),
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
        "words": len(text.split()),
        "whole": True,
    }
    assert result["kv_bytes"] == 2 * 2 * 64 * 8 * 2 * 4  # layers, KV heads, slots, head size, keys and values, bytes
    assert result["ppl_word"] == pytest.approx(math.exp(result["nll_sum"] / len(text.split())))
    assert result["bits_per_byte"] == pytest.approx(result["nll_sum"] / math.log(2) / len(text))
    assert result["ppl"] == pytest.approx(math.exp(result["nll_sum"] / result["scored"]))


def test_progress_adds_up_to_the_result(loaded, book):
    seen = []
    result = run_perplexity(loaded, source(book), POLICY, RunOptions(chunk=50), [seen.append])
    assert sum(progress.n for progress in seen) == result["scored"]
    assert math.fsum(progress.nll for progress in seen) == pytest.approx(result["nll_sum"], rel=1e-12)
    assert [progress.token for progress in seen[:2]] == [50, 100]
    assert seen[-1].token == result["tokens"]
    assert seen[-1].byte == result["input"]["bytes"]
    assert seen[-1].fraction == 1.0
    assert seen[-1].ppl == result["ppl"]
    assert all(sum(progress.composition.values()) == progress.slots <= 64 for progress in seen)


def test_an_input_without_tokens_or_with_one_has_a_defined_result(loaded, tmp_path):
    for name, text, tokens in (("empty", "", 0), ("one", "a", 1)):
        (tmp_path / name).write_text(text)
        result = run_perplexity(loaded, source(tmp_path / name), POLICY)
        assert (result["tokens"], result["scored"], result["nll_sum"]) == (tokens, 0, 0.0)
        assert result["ppl"] is result["ppl_word"] is result["bits_per_byte"] is None
        assert result["complete"]


def test_an_interrupted_run_tells_what_it_finished_and_no_more(loaded, book):
    class AfterThree:
        requested = False

        def __call__(self, progress):
            self.requested = progress.token >= 96

        def waiting(self):
            import contextlib

            return contextlib.nullcontext()

    stop = AfterThree()
    result = run_perplexity(loaded, source(book), POLICY, RunOptions(chunk=32), [stop], stop)
    assert (result["tokens"], result["scored"], result["complete"]) == (96, 95, False)
    assert not result["input"]["whole"]
    shorter = run_perplexity(loaded, source(book), POLICY, RunOptions(chunk=32, max_tokens=96))
    assert result["nll_sum"] == shorter["nll_sum"]


def test_a_run_goes_on_from_its_state_with_the_same_digits(loaded, book):
    whole = run_perplexity(loaded, source(book), POLICY, RunOptions(chunk=32))
    with PerplexityRun(loaded, source(book), POLICY, RunOptions(chunk=32)) as run:
        for _ in zip(range(5), run.chunks(), strict=False):
            pass
        tensors, counts = run.state()
        saved = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(counts))
    with PerplexityRun(loaded, source(book), POLICY, RunOptions(chunk=32), saved=saved) as run:
        for _ in run.chunks():
            pass
        resumed = run.result()
    times = {"seconds", "tokens_per_second", "peak_rss_bytes"}
    assert {k: v for k, v in resumed.items() if k not in times} == {k: v for k, v in whole.items() if k not in times}


def test_each_document_starts_with_an_empty_cache(loaded, book):
    first, second = (run_perplexity(loaded, source(book), POLICY) for _ in range(2))
    assert first["nll_sum"] == second["nll_sum"]
    assert first["evictions"] == second["evictions"]


def test_a_failure_after_some_chunks_keeps_what_was_finished(loaded, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(TEXT.encode() * 40 + b"caf\xe9")
    with pytest.raises(RunFailed, match=f"{len(TEXT) * 40 + 3}") as caught:
        run_perplexity(loaded, source(path), POLICY, RunOptions(chunk=128))
    assert caught.value.result["scored"] > 0
    assert not caught.value.result["complete"]
    path.write_bytes(b"\xe9 " + TEXT.encode())
    with pytest.raises(UserError, match="byte 0") as early:
        run_perplexity(loaded, source(path), POLICY)
    assert not isinstance(early.value, RunFailed)


@pytest.mark.parametrize("chunk", [1, 8])
def test_a_loss_that_is_no_number_stops_the_run_with_the_token(tmp_path, chunk):
    loaded = load_model(str(make_folder(tmp_path / "model", broken_token="z")), dtype="float32", device="cpu")
    text = "a" * 5 + "b" * 60 + "zz"
    (tmp_path / "text").write_text(text)
    ids = loaded.tokenizer(text).input_ids
    bad = ids.index(loaded.tokenizer.convert_tokens_to_ids("z"))
    with pytest.raises(RunFailed) as caught:
        run_perplexity(loaded, source(tmp_path / "text"), POLICY, RunOptions(chunk=chunk))
    # In a chunk a value that is not a number spoils the queries before it too: zero times it is not zero.
    first = bad + 1 if chunk == 1 else bad // chunk * chunk + 1
    last = min(bad // chunk * chunk + chunk, len(ids))
    said = f"token {first} is not" if chunk == 1 else f"token {first} or of one after it, up to {last}, is not"
    assert said in str(caught.value)
    assert first <= bad + 1 <= last or chunk == 1
    assert caught.value.result["scored"] == (first - 1 if chunk == 1 else first - 2)
    assert math.isfinite(caught.value.result["ppl"])


def test_a_budget_that_is_not_kept_fails_the_run(loaded, book, monkeypatch):
    monkeypatch.setattr(SlotCache, "_evict", lambda cache: None)
    with pytest.raises(RunFailed, match="budget was not kept"):
        run_perplexity(loaded, source(book), POLICY, RunOptions(max_tokens=200))


def test_a_cache_larger_than_the_model_was_trained_for_is_refused(loaded, book):
    for cache, chunk in ((513, 1), (500, 64)):
        with pytest.raises(UsageError, match="512"):
            run_perplexity(loaded, source(book), make_policy("h2o", cache=cache), RunOptions(chunk=chunk))
