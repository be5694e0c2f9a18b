"""Tokenising window by window gives the ids of tokenising the whole text at once."""

import copy
import functools
import json
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import streamh2o.text.tokenize
from streamh2o.errors import UserError
from streamh2o.text.tokenize import Piece, WindowTokenizer
from tests import toy_tokenizers
from tests.toy_tokenizers import CORPUS, TOYS, smollm2

FRAGMENTS = st.sampled_from(
    [
        *["a", "ab", "an", "e", "hello", "World", "Σ", "İ", "1", "23", "456", "'s", "'ll", ".", "...", "!", "-", "_"],
        *[" ", " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "漢", "字", "。", "ｶﾞ", "ﬁ", "＂"],
        *["é", "e\u0301", "\u0301", "\u0308", "\u0345", "가", "\u1100", "\u1161", "\u11a8", "ि", "हिन्दी", "\u0d4e"],
        *["😀", "👩‍👩‍👧", "🇩🇪", "\u200d", "\ufeff", "\u0600", "\0", "\x1b[2J", "�", "\U0010ffff"],
        *["<|im_end|>", "<s>", "<think>", "abab", "▁", "<0x0A>", "Ġ"],
    ]
)
RUNS = st.builds(str.__mul__, FRAGMENTS, st.sampled_from([1, 1, 1, 2, 3, 7, 30, 100]))
TEXTS = st.lists(RUNS | st.text(max_size=8), max_size=40).map("".join)
many = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def chunks(text: str, size: int = 65_536):
    """What the decoder makes of `text`, some characters at a time."""
    offset = 0
    for index in range(0, len(text), size):
        part = text[index : index + size]
        lengths = [len(character.encode()) for character in part] if not part.isascii() else [1] * len(part)
        ends = offset + np.cumsum(np.array(lengths, np.int64))
        yield part, ends - np.array(lengths, np.int64), int(ends[-1])
        offset = int(ends[-1])


def whole(tokenizer: Tokenizer, text: str):
    """The tokenizer's own encoding of all of `text`, with special tokens' strings as plain text."""
    return _plain(tokenizer).encode(text, add_special_tokens=False)


@functools.cache
def _plain(tokenizer: Tokenizer) -> Tokenizer:
    parts = json.loads(tokenizer.to_str())
    if parts["model"]["type"] == "Unigram":
        # Its model finds special tokens in a text by itself, so they have to go from its vocabulary.
        special = {token["content"] for token in parts["added_tokens"]}
        parts["model"]["vocab"] = [
            [f"nowhere {n}" if piece in special else piece, score]
            for n, (piece, score) in enumerate(parts["model"]["vocab"])
        ]
        parts["added_tokens"] = []
    plain = Tokenizer.from_str(json.dumps(parts))
    plain.encode_special_tokens = True
    plain.post_processor = None
    return plain


def joined(pieces: list[Piece]) -> Piece:
    return Piece(
        ids=np.concatenate([piece.ids for piece in pieces]),
        starts=np.concatenate([piece.starts for piece in pieces]),
        words=np.concatenate([piece.words for piece in pieces]),
        end=pieces[-1].end,
        end_words=pieces[-1].end_words,
        place=pieces[0].place,
        last=pieces[-1].last,
    )


_tools: dict[tuple[int, int], WindowTokenizer] = {}


def _tool(tokenizer, window: int) -> WindowTokenizer:
    """A new one, but for the copy of the tokenizer, which takes long."""
    key = (id(tokenizer), window)
    if key not in _tools:
        _tools[key] = WindowTokenizer(tokenizer, window=window)
    return copy.copy(_tools[key])


def incremental(tokenizer, text: str, window: int = 64, size: int = 50) -> tuple[Piece, bool]:
    tool = _tool(tokenizer, window)
    return joined(list(tool.pieces(chunks(text, size)))), tool.exact


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
@given(text=TEXTS, window=st.sampled_from([16, 32, 64, 128, 256]), size=st.sampled_from([1, 7, 50]))
@many
def test_ids_are_those_of_the_whole_text(toy, text, window, size):
    result, exact = incremental(toy(), text, window, size)
    if window < 256:
        assume(exact)  # tokens may reach across a window of a few characters, and then that is said
    assert exact
    assert result.ids.tolist() == whole(toy(), text).ids
    assert result.last
    assert result.end == len(text.encode())
    assert result.end_words == len(text.split())


@given(text=TEXTS, window=st.sampled_from([64, 256]))
@settings(many, max_examples=60)
def test_ids_of_the_real_tokenizer_are_those_of_the_whole_text(text, window):
    tokenizer = smollm2()
    result, exact = incremental(tokenizer, text, window)
    assert exact
    expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert result.ids.tolist() == expected


@pytest.mark.parametrize("toy", [toy_tokenizers.gpt2, toy_tokenizers.llama3], ids=["gpt2", "llama3"])
@given(text=TEXTS, window=st.sampled_from([32, 64, 256]))
@many
def test_every_token_of_a_byte_bpe_begins_at_its_first_byte(toy, text, window):
    result, _ = incremental(toy(), text, window)
    letters = {letter: byte for byte, letter in _bytes_to_letters().items()}
    data, ends = text.encode(), [*result.starts.tolist(), result.end][1:]
    for index, start, end in zip(result.ids.tolist(), result.starts.tolist(), ends, strict=True):
        assert data[start:end] == bytes(letters[letter] for letter in toy().id_to_token(index))


def _bytes_to_letters() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
@given(text=TEXTS, window=st.sampled_from([64, 256]))
@settings(many, max_examples=40)
def test_byte_offsets_are_those_of_the_whole_texts_tokens(toy, text, window):
    result, exact = incremental(toy(), text, window)
    assume(exact)
    spans = whole(toy(), text).offsets
    bytes_before = np.cumsum([0] + [len(character.encode()) for character in text])
    width = np.diff(bytes_before, append=bytes_before[-1])
    assert (np.diff(result.starts) >= 0).all()
    for (start, _), offset in zip(spans, result.starts.tolist(), strict=True):
        assert bytes_before[start] <= offset <= bytes_before[start] + max(0, width[start] - 1)


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
@pytest.mark.parametrize("letters", ["random", "same", "digits", "chinese"])
def test_a_hundred_thousand_letters_without_a_space(toy, letters):
    rng = random.Random(7)
    alphabet = {"random": "abcdefghijklmnopqrstuvwxyzé", "same": "a", "digits": "0123456789", "chinese": "漢字日本我们"}
    text = "Before it. " + "".join(rng.choices(alphabet[letters], k=100_000)) + " and after."
    result, exact = incremental(toy(), text, window=32_768, size=65_536)
    assert exact
    assert result.ids.tolist() == whole(toy(), text).ids


def _book(characters: int) -> str:
    """A text like a book's: lines, paragraphs, dialogue, some Chinese, numbers and emoji."""
    rng = random.Random(3)
    words = " ".join(CORPUS).split() + ["the", "of", "and", "a", "to", "in", "he", "was", "it", "she"] * 20
    parts: list[str] = []
    length = 0
    while length < characters:
        word = rng.choice(words) + rng.choice([" "] * 12 + ["\n", "\r\n", ".\n\n", "  ", ", ", "—"])
        parts.append(word)
        length += len(word)
    return "".join(parts)


@pytest.mark.parametrize("toy", [*TOYS, smollm2], ids=lambda toy: toy.__name__)
def test_a_books_ids_with_the_windows_that_are_really_used(toy):
    tokenizer, text = toy(), _book(300_000)
    result, exact = incremental(tokenizer, text, streamh2o.text.tokenize.WINDOW, 65_536)
    assert exact
    assert result.ids.tolist() == whole(getattr(tokenizer, "backend_tokenizer", tokenizer), text).ids
    assert result.end_words == len(text.split())


def test_words_are_counted_up_to_each_token():
    text = "  one two\u3000three\n\nfour漢 five "
    result, _ = incremental(toy_tokenizers.gpt2(), text, window=16, size=3)
    data = text.encode()
    for start, words in zip(result.starts.tolist(), result.words.tolist(), strict=True):
        assert words == len(data[:start].decode(errors="ignore").split())


@pytest.mark.parametrize("toy", [smollm2, toy_tokenizers.gpt2, toy_tokenizers.llama2, toy_tokenizers.unigram])
def test_a_special_tokens_string_in_a_text_is_plain_text_unless_allowed(toy):
    tokenizer = toy()
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    special = backend.token_to_id("<|im_end|>")
    text = "She wrote <|im_end|> on the wall, and <|im_end|>"
    assert special not in incremental(tokenizer, text)[0].ids
    allowed = WindowTokenizer(tokenizer, allow_special=True)
    assert special in joined(list(allowed.pieces(chunks(text)))).ids


def test_the_users_tokenizer_is_left_as_it_was():
    tokenizer = toy_tokenizers.roberta()
    tokenizer.enable_truncation(3)
    before = tokenizer.to_str()
    try:
        tool = WindowTokenizer(tokenizer)
        assert len(joined(list(tool.pieces(chunks("a text of more than three tokens")))).ids) > 3
        assert tokenizer.to_str() == before
        assert tokenizer.encode_special_tokens is False
    finally:
        tokenizer.no_truncation()


def test_an_empty_text_has_no_tokens():
    result, _ = incremental(toy_tokenizers.gpt2(), "")
    assert (len(result.ids), result.end, result.end_words, result.last) == (0, 0, 0, True)


def test_a_tokenizer_without_a_fast_version_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="has no fast version"):
        WindowTokenizer(object())


def test_a_tokenizer_whose_rules_are_not_known_promises_nothing_but_still_does_its_best():
    tokenizer = Tokenizer.from_str(toy_tokenizers.gpt2().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\w+(?=.*!)|\s"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    text = _book(50_000)
    result, exact = incremental(tokenizer, text, window=4096, size=65_536)
    assert not exact
    assert result.end == len(text.encode())


def test_unigram_without_words_promises_nothing_but_still_agrees_on_a_book():
    tokenizer = Tokenizer.from_str(toy_tokenizers.unigram().to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    text = _book(50_000)
    result, exact = incremental(tokenizer, text, window=4096, size=65_536)
    assert not exact
    assert result.ids.tolist() == whole(tokenizer, text).ids


@pytest.mark.parametrize("toy", [toy_tokenizers.llama3, toy_tokenizers.llama2, smollm2], ids=lambda toy: toy.__name__)
def test_long_words_of_a_bpe_are_cut_inside_and_need_not_be_held(toy, monkeypatch):
    monkeypatch.setattr(streamh2o.text.tokenize, "LONGEST_WORD", 4096)
    tokenizer, rng = toy(), random.Random(1)
    text = "Long: " + "".join(rng.choices("aabcnté漢", k=50_000)) + " " + "=" * 20_000 + " done"
    result, exact = incremental(tokenizer, text, window=2048, size=65_536)
    assert exact
    assert result.ids.tolist() == whole(getattr(tokenizer, "backend_tokenizer", tokenizer), text).ids


def test_a_word_too_long_to_hold_is_cut_and_the_promise_withdrawn(monkeypatch):
    monkeypatch.setattr(streamh2o.text.tokenize, "LONGEST_WORD", 2048)
    text = "x " + " " * 10_000 + "y " + "\u0301" * 10_000 + " z"
    result, exact = incremental(toy_tokenizers.starcoder(), text, window=256)
    assert not exact
    assert toy_tokenizers.starcoder().decode(result.ids.tolist(), skip_special_tokens=False) is not None
    assert (result.end, result.end_words) == (len(text.encode()), len(text.split()))


@pytest.mark.parametrize("text", [_book(60_000), "the cat " * 7_500, "letters" * 8_500], ids=["book", "line", "word"])
def test_ten_times_the_text_takes_at_most_twelve_times_as_long(text):
    tool = WindowTokenizer(toy_tokenizers.gpt2())

    def seconds(given: str) -> float:
        begin = time.process_time()
        for _ in tool.pieces(chunks(given)):
            pass
        return time.process_time() - begin

    seconds(text)
    assert any(seconds(text * 10) <= 12 * seconds(text) for _ in range(4))


def test_normalisers_are_cut_only_where_nothing_joins():
    nfc = Tokenizer(models.BPE(unk_token="?", fuse_unk=False))
    nfc.normalizer = normalizers.NFKC()
    nfc.train_from_iterator(
        ["가각간 e\u0301é ｶﾞガ"], trainers.BpeTrainer(special_tokens=["?"], vocab_size=60, show_progress=False)
    )
    for unit in ("\u1100\u1161\u11a8", "e\u0301", "ｶﾞ", "a\u0323\u0307"):
        text = unit * 400
        result, exact = incremental(nfc, text, window=64, size=7)
        assert exact
        assert result.ids.tolist() == whole(nfc, text).ids
