"""The loop for Python: however a text is cut, its ids and losses are those of the whole."""

import io
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o import Stream, StreamCache, load_model, make_policy
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import TORCH
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.text import incremental
from streamh2o.text.incremental import IncrementalTokenizer
from tests import toy_tokenizers
from tests.tiny_folder import TEXT, make_folder

LONG = "".join(f"{number}. {TEXT}" for number in range(60))


@pytest.fixture(scope="module", params=["plain", "bos"])
def loaded(request, tmp_path_factory):
    bos = request.param == "bos"
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"), bos=bos)), dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(incremental, "WINDOW", 128)


def pieces_of(text, cuts):
    places = [0, *sorted(round(cut * len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def stream(loaded, **how):
    return Stream(loaded.model, loaded.tokenizer, **{"cache": 48, "chunk": 16, **how})


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(
        st.sampled_from([LONG[:300], "a" * 700, " ", "\n\n", "é🏽", "12 ", "<|im_end|>", "word"]), max_size=12
    ),
    cuts=st.lists(st.floats(0, 1), max_size=40),
    kept=st.integers(0, 40),
)
def test_ids_of_a_text_in_pieces_are_those_of_the_whole(text, cuts, kept):
    whole, tokenizer = "".join(text), toy_tokenizers.gpt2()
    tokenizer.encode_special_tokens = True
    given_pieces, found = IncrementalTokenizer(tokenizer), [np.empty(0, np.int64)]
    for number, piece in enumerate(pieces_of(whole, cuts)):
        found.append(given_pieces.add(piece))
        if number == kept:
            state, given_pieces = given_pieces.state(), IncrementalTokenizer(tokenizer)
            given_pieces.load(state)
    held = len(given_pieces.held)
    found.append(given_pieces.end())
    assert np.concatenate(found).tolist() == tokenizer.encode(whole, add_special_tokens=False).ids
    assert held <= 4 * 128 + 1400, "no more is held back than a few windows, or one long word"
    assert given_pieces.end().tolist() == []


def test_a_long_text_is_not_held_back():
    pieces, given_ids, most = IncrementalTokenizer(toy_tokenizers.gpt2()), 0, 0
    for start in range(0, len(LONG), 10):
        given_ids += len(pieces.add(LONG[start : start + 10]))
        most = max(most, len(pieces.held))
    assert given_ids > 1000
    assert most < 4 * 128


@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.floats(0, 1), max_size=6))
def test_losses_are_those_of_the_whole_however_it_is_cut(loaded, cuts):
    ids = loaded.tokenizer(LONG, return_tensors="pt").input_ids
    with ChunkStream(loaded.model, make_policy("streamh2o", 48), chunk=16) as whole:
        expected = torch.cat([whole.feed(part).losses[0] for part in ids.split(16, dim=1)])
    with stream(loaded) as found:
        parts = [found.feed(piece) for piece in pieces_of(LONG, cuts)]
        assert found.tokens % 16 == 0
        parts.append(found.finish())
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(found.losses, expected)
        assert found.tokens == ids.shape[1]
        assert found.ppl == pytest.approx(math.exp(expected.double().mean()))
        assert (found.slots, found.evictions) == (whole.slots, whole.evictions)
        assert sum(found.composition().values()) == found.slots == 48


def test_ids_are_read_at_once_after_what_waits_of_a_text(loaded):
    ids = loaded.tokenizer(LONG, add_special_tokens=False).input_ids[:40]
    with stream(loaded) as mixed:
        assert mixed.feed("The quick").numel() == 0
        first = mixed.feed(ids[:1])
        assert mixed.tokens - 1 == len(first) == len(mixed.losses) > 1
        assert len(mixed.feed(torch.tensor(ids[1:])[None])) == 39
        assert math.isfinite(mixed.ppl)
    with stream(loaded) as alone, Stream(loaded.model, cache=48, chunk=16, bos="no") as bare:
        bos = loaded.tokenizer("a").input_ids[0] == loaded.tokenizer.bos_token_id
        assert len(alone.feed(ids)) == 39 + bos
        assert len(bare.feed(ids)) == 39
        assert math.isnan(Stream(loaded.model, cache=48, chunk=16).ppl)


@pytest.mark.parametrize("cut", [0, 5, 700, 1511])
def test_another_stream_goes_on_from_its_state_with_the_same_digits(loaded, cut):
    with stream(loaded, kv_bits=8) as whole:
        whole.feed(LONG), whole.finish()
    with stream(loaded, kv_bits=8) as first:
        first.feed(LONG[:cut])
        saved = io.BytesIO()
        torch.save(first.state(), saved)
        first.feed(LONG[cut:])
    saved.seek(0)
    with stream(loaded, kv_bits=8) as second:
        second.load_state(torch.load(saved, weights_only=True))
        second.feed(LONG[cut:]), second.finish()
        assert torch.equal(second.losses, whole.losses)
    with (
        stream(loaded, cache=40) as other,
        pytest.raises(UserError, match=r"state is of .*, and this Stream is of"),
    ):
        other.load_state(first.state())


def test_what_it_cannot_take_is_said(loaded):
    with pytest.raises(UsageError, match="second argument is a tokenizer, not 'h2o'; say policy='h2o'"):
        Stream(loaded.model, "h2o")
    with pytest.raises(UsageError, match="it must be chunk or token"):
        stream(loaded, evict="never")
    with Stream(loaded.model, cache=48, chunk=16) as bare, pytest.raises(UsageError, match="without a tokenizer"):
        bare.feed("text")
    with stream(loaded) as found:
        for odd in (torch.zeros(2, 3, dtype=torch.int64), [0.5], [[[1]]]):
            with pytest.raises(UsageError, match=r"ids are whole numbers, .* not \("):
                found.feed(odd)
        for odd in (None, b"abc", 7, [[1], [2, 3]]):
            with pytest.raises(UsageError, match=f"text, or ids as a list or a tensor, not a {type(odd).__name__}"):
                found.feed(odd)
        for odd in ([-1], [1, 10**6]):
            with pytest.raises(UsageError, match="ids lie between 0 and"):
                found.feed(odd)
        for odd in ({}, None, {"tensors": {}}):
            with pytest.raises(UserError, match="no state of a Stream: it lacks counts"):
                found.load_state(odd)
        assert found.feed([]).numel() == found.feed("").numel() == found.tokens == 0
    with stream(loaded, policy="full") as found:
        for more in (LONG * 20, [1], [1]):
            with pytest.raises(UserError, match="longer than the"):
                found.feed(more)


@pytest.mark.usefixtures("built")
def test_it_computes_with_the_kernel_that_the_model_was_loaded_with(loaded):
    plain = replace(loaded, kernel=TORCH)
    settings = {"cache": 48, "chunk": 16}
    for how, name in (({}, "torch"), ({"kernel": "compiled"}, "compiled")):
        with Stream(plain, **settings, **how) as stream, StreamCache.for_model(plain, **settings, **how) as cache:
            assert (stream._stream.kernel.name, cache.kernel.name) == (name, name)
    with Stream(loaded.model, **settings) as stream:
        assert stream._stream.kernel.name == "compiled"
