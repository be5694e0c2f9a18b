"""Perplexity as other tools define it, against the loops of their documentation and source."""

import json
import math
import re
import shutil
import subprocess
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.runs.windowed import DEFINITIONS, make_definition
from streamh2o.runs.windowed.base import Ids
from streamh2o.runs.windowed.hf import HuggingFace
from streamh2o.runs.windowed.llamacpp import LlamaCpp
from streamh2o.runs.windowed.lmeval import LmEval
from tests.call import one_sentence
from tests.model_folders import gguf_file, llama
from tests.tiny_folder import make_book, make_folder

PLACE = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--quiet")


@pytest.fixture(scope="module", params=["plain", "bos"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp(request.param), bos=request.param == "bos")


def result(streamh2o, folder, book, *options):
    code, out, err = streamh2o("ppl", book, "--model", folder, *options, "--json", "-", *PLACE)
    assert code == 0, err
    return json.loads(out)


def log_likelihoods(model, ids: list[int]) -> torch.Tensor:
    """Of each token but the first, given those before it, float64 [len(ids) - 1]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def documented(model, ids: list[int], max_length: int, stride: int) -> tuple[float, int]:
    """The loop of the transformers documentation, with labels and the model's own loss."""
    total, count, reached = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        new = end - reached
        part = torch.tensor([ids[begin:end]])
        labels = part.clone()
        labels[:, :-new] = -100
        with torch.no_grad():
            loss = float(model(part, labels=labels).loss)
        valid = int((labels != -100).sum()) - 1
        if valid:
            total += loss * valid
            count += valid
        reached = end
        if end == len(ids):
            break
    return total / count, count


@pytest.mark.parametrize(("context", "stride"), [(64, 32), (64, 64), (50, 7), (300, 100)])
def test_hf_is_the_loop_of_its_documentation(streamh2o, folder, tmp_path, context, stride):
    loaded, book = load_model(str(folder), dtype="float32", device="cpu"), make_book(tmp_path)
    mean, count = documented(loaded.model, loaded.tokenizer(book.read_text()).input_ids, context, stride)
    found = result(streamh2o, folder, book, "--ppl-def", "hf", "--context", context, "--stride", stride)
    assert found["scored"] == count
    assert found["nll_mean"] == pytest.approx(mean, abs=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(mean), rel=1e-5)


@pytest.mark.parametrize("context", [16, 33, 100])
def test_llamacpp_scores_the_second_half_of_each_whole_chunk(streamh2o, folder, tmp_path, context):
    """Of a chunk of n, the tokens n/2 + 1 to n - 1, each after all before it, the first one replaced by the BOS."""
    loaded, book = load_model(str(folder), dtype="float32", device="cpu"), make_book(tmp_path)
    ids = loaded.tokenizer(book.read_text()).input_ids
    bos = loaded.tokenizer.bos_token_id
    total, count = 0.0, 0
    for chunk in range(len(ids) // context):
        part = ids[chunk * context : (chunk + 1) * context]
        if bos is not None and ids[0] == bos:
            part[0] = bos
        scored = log_likelihoods(loaded.model, part)[context // 2 :]
        assert len(scored) == context - context // 2 - 1
        total, count = total - float(scored.sum()), count + len(scored)
    found = result(streamh2o, folder, book, "--ppl-def", "llamacpp", "--context", context)
    assert found["scored"] == count
    assert found["nll_mean"] == pytest.approx(total / count, abs=1e-5)
    assert found["bits_per_byte"] is None


@pytest.mark.skipif(shutil.which("llama-perplexity") is None, reason="llama-perplexity of llama.cpp is not on PATH")
@pytest.mark.parametrize("bos", [False, True])
def test_llamacpp_is_what_llama_perplexity_itself_says(streamh2o, tmp_path, bos):
    model = gguf_file(tmp_path / "model.gguf", llama(max_position_embeddings=512), bos=bos)
    book = make_book(tmp_path)
    book.write_text(4 * book.read_text())
    command = ["llama-perplexity", "-m", model, "-f", book, "-c", "256", "-ctk", "f32", "-ctv", "f32", "-t", "1"]
    theirs = None
    for _ in range(50):  # it may end before its last lines are written
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        if theirs := re.search(r"Final estimate: PPL = ([0-9.]+)", run.stdout + run.stderr):
            break
    assert theirs, run.stderr
    found = result(streamh2o, model, book, "--ppl-def", "llamacpp", "--context", "256")
    assert found["ppl"] == pytest.approx(float(theirs[1]), rel=1e-4)


@pytest.mark.parametrize("context", [16, 100, 500])
def test_lmeval_scores_every_token_once_in_windows_that_share_one(streamh2o, folder, tmp_path, context):
    loaded, book = load_model(str(folder), dtype="float32", device="cpu"), make_book(tmp_path)
    text = "\n " + book.read_text()
    book.write_text(text)
    ids = loaded.tokenizer(text).input_ids
    prefix = loaded.tokenizer.bos_token_id
    if prefix is None:
        pytest.skip("needs an end-of-text token; see the next test")
    total, done = 0.0, 0
    while done < len(ids):
        end = min(done + context, len(ids))
        before = [prefix, *ids][max(0, end - context) : done + 1]  # the last window reaches back as far as it can
        total -= float(log_likelihoods(loaded.model, before + ids[done:end])[len(before) - 1 :].sum())
        done = end
    found = result(streamh2o, folder, book, "--ppl-def", "lmeval", "--context", context)
    assert found["scored"] == len(ids)
    assert found["ppl"] == pytest.approx(math.exp(total / len(ids)), rel=1e-5)
    assert found["ppl_word"] == pytest.approx(math.exp(total / len(re.split(r"\s+", text))), rel=1e-5)
    assert found["ppl_byte"] == pytest.approx(math.exp(total / len(text.encode())), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)


@pytest.mark.parametrize("context", [16, 100, 500])
def test_lmeval_is_what_lm_eval_itself_says(streamh2o, tmp_path, context):
    """Runs where lm-evaluation-harness is installed: `pip install lm_eval`."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    folder, book = make_folder(tmp_path / "model", bos=True), make_book(tmp_path)
    book.write_text(text := "\n " + book.read_text())
    how = {"device": "cpu", "dtype": "float32", "batch_size": 1, "max_length": context}
    tool = harness.HFLM(pretrained=str(folder), **how)
    (likelihood,) = tool.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    found = result(streamh2o, folder, book, "--ppl-def", "lmeval", "--context", context)
    assert found["nll_sum"] == pytest.approx(-likelihood, rel=1e-5)


def test_lmeval_needs_a_token_to_begin_with(streamh2o, tmp_path):
    folder, book = make_folder(tmp_path / "model"), make_book(tmp_path)
    code, _, err = streamh2o("ppl", book, "--model", folder, "--ppl-def", "lmeval", *PLACE)
    assert code == 1
    assert "predicts the first token from a BOS or end-of-text token" in one_sentence(err)


class Tokenizer:
    bos_token_id = 7


def cut(definition, count: int, block: int):
    """The windows of the ids 100, 101, ... read in blocks."""
    ids = iter(range(100, 100 + count))

    def read(size):
        part = list(islice(ids, min(size, block)))
        return np.array(part, np.int64) if part else None

    return list(definition.windows(Ids(read)))


COUNTS = {"count": st.integers(0, 200), "context": st.integers(2, 40), "block": st.integers(1, 50)}


@settings(max_examples=200, deadline=None)
@given(**COUNTS, stride=st.integers(1, 40))
def test_hf_gives_every_token_but_the_first_one_loss(count, context, block, stride):
    windows = cut(HuggingFace(context, min(stride, context - 1)), count, block)  # without overlap, firsts have none
    scored = [number for window in windows for number in window.ids[len(window.ids) - window.scored :]]
    assert scored == list(range(101, 100 + count))
    assert all(len(window.ids) <= context for window in windows)


@settings(max_examples=200, deadline=None)
@given(**COUNTS)
def test_lmeval_gives_every_token_one_loss_and_fills_the_last_window(count, context, block):
    windows = cut(LmEval(context, 7), count, block)
    scored = [number for window in windows for number in window.ids[len(window.ids) - window.scored :]]
    assert scored == list(range(100, 100 + count))
    if count >= context:
        assert all(len(window.ids) == context + 1 for window in windows)  # the last id is only a target


@settings(max_examples=200, deadline=None)
@given(**COUNTS)
def test_llamacpp_leaves_out_first_halves_and_the_rest(count, context, block):
    definition = LlamaCpp(context, bos=7)
    if count < 2 * context:
        with pytest.raises(UserError, match=f"needs two chunks of {context} tokens, and the text has {count}"):
            cut(definition, count, block)
        return
    windows = cut(definition, count, block)
    expected = [
        100 + chunk * context + place for chunk in range(count // context) for place in range(context // 2 + 1, context)
    ]
    assert [number for w in windows for number in w.ids[len(w.ids) - w.scored :]] == expected
    assert all(window.ids[0] == 7 for window in windows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("llamacpp", "--stride", "5"), "--stride belongs to --ppl-def hf"),
        (("lmeval", "--stride", "5"), "--stride belongs to --ppl-def hf; lmeval has none"),
        (("hf", "--context", "600"), "must lie between 2 and the 512 positions"),
        (("hf", "--context", "40", "--stride", "41"), "between 1 and --context, here 40"),
        (("hf", "--policy", "h2o"), "--policy belongs to --ppl-def stream"),
        (("lmeval", "--bos", "yes"), "--bos belongs to --ppl-def stream"),
        (("llamacpp", "--per-head", "kv"), "--per-head belongs to --ppl-def stream"),
        (("stream", "--context", "40"), "a stream has --cache"),
        (("ollama",), "--ppl-def"),
    ],
)
def test_what_a_definition_does_not_have_is_bad_usage(streamh2o, folder, tmp_path, arguments, sentence):
    code, out, err = streamh2o("ppl", make_book(tmp_path), "--model", folder, "--ppl-def", *arguments, *PLACE)
    assert (code, out) == (2, "")
    assert sentence in one_sentence(err)


def test_several_inputs_are_rows_and_losses_are_kept(streamh2o, folder, tmp_path):
    books = [make_book(tmp_path, name) for name in ("a.txt", "b.txt")]
    losses = tmp_path / "losses.npy"
    how = ("--ppl-def", "hf", "--context", "64", "--stride", "32", "--nll-out", losses)
    code, out, err = streamh2o("ppl", *books, "--model", folder, *how, *PLACE)
    assert (code, err) == (0, "")
    assert out.count("64 tokens, 32 apart") == 1
    assert "a.txt" in out
    assert len(np.load(losses)) == 2 * result(streamh2o, folder, books[0], *how[:6])["losses"]


def test_defaults_are_the_tools_own():
    assert make_definition("llamacpp", 8192, _NoBos(), None, None).context == 512
    assert make_definition("llamacpp", 256, _NoBos(), None, None).context == 256
    hf = make_definition("hf", 8192, None, None, None)
    assert (hf.context, hf.stride) == (8192, 512)
    assert make_definition("lmeval", 8192, Tokenizer(), None, None).context == 8192
    assert set(DEFINITIONS) == {"hf", "llamacpp", "lmeval"}
    with pytest.raises(UsageError):
        make_definition("lmeval", 8192, Tokenizer(), 1, None)


class _NoBos:
    bos_token_id = None
