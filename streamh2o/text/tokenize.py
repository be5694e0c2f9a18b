"""Text to token ids, window by window. The ids are those of tokenising the whole text at once.

Windows overlap, and two neighbours are spliced where they agree. That this gives the whole text's ids rests on:

- *Words.* A pre-tokenizer's rules scan from left to right and look a little ahead, but not behind. So where two
  scans of one text share a word boundary, they are the same from there on; and a boundary of the left window is
  one of the whole text's if the run of white space after it ends inside the window.
- *BPE without word boundaries* (all of Llama 2's text, or a word of 100,000 letters). Tokens t1..tn are the BPE of
  their text exactly if BPE(t_i t_i+1) = t_i t_i+1 for all i: until the first merge across any of these borders,
  merges on its two sides go as if they were alone. So windows may be spliced at any token that they share.
- *Normalisers.* A cut is made only where normalising the two sides apart gives the normalised whole.

A window without a place to splice grows. Only past LONGEST_WORD characters is a cut forced; `exact` then turns False.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from streamh2o.errors import UserError
from streamh2o.text.cuts import separable, word_begins
from streamh2o.text.special_tokens import specials_as_text
from streamh2o.text.tokenizer_traits import traits

WINDOW = 32_768  # characters; large enough that the overlap costs little, small enough to stay in cache
LONGEST_WORD = 1 << 20  # characters
_MORE_BORDERS = 5  # borders that a window shares with the next, at least, for the two to agree on one

Chunks = Iterator[tuple[str, np.ndarray, int]]


class Place(NamedTuple):
    """Where tokenising can start again, so that a resumed run gets the same windows and ids."""

    byte: int  # where the window begins in the input
    after_space: bool  # whether the character before it is white space, or there is none
    length: int  # characters asked for in the window
    skip: int  # tokens of the window that come before this place


@dataclass
class Piece:
    """Final tokens, in order.

    ids: int64 [n]. starts: input offset in bytes of each token's first byte, int64 [n]. words: how many words of
    the text (as `str.split` sees them) began before each token, int64 [n]. end, end_words: the same for what
    follows the piece. place: where to start again to get these tokens. last: nothing follows.
    """

    ids: np.ndarray
    starts: np.ndarray
    words: np.ndarray
    end: int
    end_words: int
    place: Place
    last: bool


@dataclass
class _Window:
    """One tokenised stretch of the buffer. starts, ends: characters from the window's beginning, both rising."""

    text: str
    length: int  # characters asked for
    final: bool  # the input ends where the window ends
    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    words: np.ndarray  # the pre-tokenizer's word that a token is part of

    def borders(self, between_words: bool) -> np.ndarray:
        """The tokens that begin where all before them have ended, at least one; between words only, if so asked."""
        apart = (self.ends[:-1] <= self.starts[1:]) & (self.starts[:-1] < self.starts[1:])
        if between_words:
            apart &= self.words[:-1] != self.words[1:]
        return np.flatnonzero(apart) + 1


class WindowTokenizer:
    """A tokenizer's ids for a text of any length, in linear time and bounded memory.

    tokenizer: a fast `transformers` tokenizer or a `tokenizers.Tokenizer`; it is copied, not changed.
    allow_special: let strings such as `<|im_end|>` in the text become special tokens, not the ids of their letters.
    window: characters tokenised at once.
    exact: whether the ids are promised to be those of tokenising the whole text at once.
    """

    def __init__(self, tokenizer: Any, *, allow_special: bool = False, window: int = WINDOW) -> None:
        from tokenizers import Tokenizer

        backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            kind = type(tokenizer).__name__
            raise UserError(f"{kind} has no fast version; use a model that comes with a tokenizer.json")
        description = backend.to_str()
        self._tokenizer = Tokenizer.from_str(description if allow_special else specials_as_text(description))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # it may trim offsets
        self._tokenizer.encode_special_tokens = not allow_special
        self._traits = traits(description, allow_special)
        self._lengths: np.ndarray | None = None
        self.exact = self._traits.exact
        self._window = window
        self._overlap = max(window // 32, 2 * self._traits.longest_added, 16)
        self._margin = max(window // 128, self._traits.longest_added, 4)

    def pieces(self, chunks: Chunks, start: Place | None = None, words: int = 0) -> Iterator[Piece]:
        """Final tokens of the text that `chunks` gives.

        chunks: text, the input offset of each character (int64), and the offset after the last one.
        start, words: go on from this place of an earlier run, after this many words; `chunks` begins at `start.byte`.
        """
        place = start or Place(0, True, self._window, 0)
        buffer = _Buffer(chunks, place.byte)
        window = self._encode(buffer, 0, place.length)
        at = _character(window, place.skip)
        while not window.final:
            spliced = self._splice(buffer, window, at)
            if spliced is None and window.length < LONGEST_WORD:
                grown = self._encode(buffer, 0, min(2 * window.length, LONGEST_WORD))
                skip = int(np.searchsorted(grown.starts, at))
                if skip != place.skip or not np.array_equal(grown.ids[:skip], window.ids[:skip]):
                    self.exact = False  # tokens reach back over nearly a window
                window, place = grown, place._replace(length=grown.length, skip=skip)
                continue
            begin, cut, following = spliced or self._force(buffer, window, at)
            piece = self._piece(buffer, window, place, at, cut, words)
            yield piece
            words = piece.end_words
            place = Place(
                byte=int(buffer.offsets[begin]),
                after_space=window.text[begin - 1].isspace(),
                length=following.length,
                skip=int(np.searchsorted(following.starts, cut - begin)),
            )
            buffer.drop(begin)
            window, at = following, cut - begin
        yield self._piece(buffer, window, place, at, len(window.text), words)

    def _encode(self, buffer: "_Buffer", begin: int, length: int) -> _Window:
        final = not buffer.reaches(begin + length + 1)
        text = buffer.text[begin : begin + length]
        # A batch, though of one: only encode_batch lets go of the interpreter, which the model needs meanwhile.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        count = len(encoding)
        spans = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * count).reshape(count, 2)
        words = np.fromiter((-1 if word is None else word for word in encoding.word_ids), np.int64, count)
        starts = np.minimum.accumulate(spans[::-1, 0])[::-1]
        ends = np.maximum.accumulate(spans[:, 1])
        ids = np.fromiter(encoding.ids, np.int64, count)
        return _Window(text, length, final, ids, starts, ends, words)

    def _splice(self, buffer: "_Buffer", window: _Window, at: int) -> tuple[int, int, _Window] | None:
        """Where the next window begins, a later character at which to go over to it, and the window itself."""
        for between_words in (True, False) if self._traits.inside_words else (True,):
            begin = self._beginning(window, between_words)
            if begin is None or not (between_words or self._cuttable(window, begin)):
                continue
            length = max(self._window, len(window.text) - begin + self._window - self._overlap)
            following = self._encode(buffer, begin, length)
            cut = self._agreement(window, following, begin, at, between_words)
            if cut is not None:
                return begin, cut, following
        return None

    def _force(self, buffer: "_Buffer", window: _Window, at: int) -> tuple[int, int, _Window]:
        """Where to cut if no cut is surely right: at the last border of tokens."""
        self.exact = False
        borders = window.starts[window.borders(between_words=False)]
        borders = borders[(borders > at) & (borders <= len(window.text) - self._margin)]
        cut = int(borders[-1]) if len(borders) else len(window.text)
        return cut, cut, self._encode(buffer, cut, self._window)

    def _beginning(self, window: _Window, between_words: bool) -> int | None:
        """A border about an overlap before the window's end, with some more borders after it."""
        borders = window.starts[window.borders(between_words)]
        borders = borders[borders <= len(window.text) - self._margin]
        wanted = int(np.searchsorted(borders, len(window.text) - self._overlap))
        for index in range(min(wanted, len(borders) - _MORE_BORDERS), -1, -1):
            if borders[index] < len(window.text) // 2:
                break
            if separable(window.text, int(borders[index])):
                return int(borders[index])
        return None

    def _cuttable(self, window: _Window, begin: int) -> bool:
        """Whether one long word, whose offsets can be trusted, reaches from before `begin` to the last borders."""
        missing = self._traits.missing_bytes
        if missing:
            data = window.text.encode()
            if len(data.translate(None, missing)) < len(data):
                return False
        if not self._traits.splits_words:
            return True
        first = int(np.searchsorted(window.starts, begin))
        last = int(np.searchsorted(window.starts, len(window.text) - self._margin)) - 1
        return bool(window.words[first - 1] == window.words[last])

    def _agreement(self, left: _Window, right: _Window, begin: int, at: int, between_words: bool) -> int | None:
        """The last character at which both windows begin a token after one that they share, or None."""
        lefts, rights = left.borders(between_words), right.borders(between_words)
        common, left_index, right_index = np.intersect1d(
            left.starts[lefts], right.starts[rights] + begin, assume_unique=True, return_indices=True
        )
        lefts, rights = lefts[left_index], rights[right_index]
        good = (left.ids[lefts - 1] == right.ids[rights - 1]) & (common >= at)
        good &= left.starts[lefts - 1] == right.starts[rights - 1] + begin
        good &= left.ends[lefts - 1] == right.ends[rights - 1] + begin
        # Only past a run of white space that ends in the window is a border of words certain.
        solid = len(left.text[:-1].rstrip()) - 1 if self._traits.splits_words else len(left.text)
        good &= common <= min(solid, len(left.text) - self._margin)
        inside = not between_words and self._traits.splits_words
        if inside:
            good &= left.words[lefts] == left.words[lefts - 1]
            good &= right.words[rights] == right.words[rights - 1]
        for cut in common[good][::-1].tolist():
            # White space does not tell which word it belongs to before it has ended.
            blank = inside and (left.text[cut - 1].isspace() or left.text[cut].isspace())
            if not blank and separable(left.text, cut):
                return cut
        return None

    def _piece(self, buffer: "_Buffer", window: _Window, place: Place, at: int, cut: int, words: int) -> Piece:
        """The window's tokens that begin from character `at` to before `cut`."""
        last = window.final and cut == len(window.text)
        first, upto = place.skip, len(window.ids) if last else int(np.searchsorted(window.starts, cut))
        offsets = np.append(buffer.offsets[: len(window.text)], buffer.offset(len(window.text)))
        starts = self._bytes(window, offsets)[first:upto]
        text = window.text[at:cut]
        before = window.text[at - 1].isspace() if at else place.after_space
        begins = word_begins(text, before) + at
        return Piece(
            ids=window.ids[first:upto],
            starts=starts,
            words=words + np.searchsorted(begins, window.starts[first:upto]),
            end=int(offsets[cut]),
            end_words=words + len(begins),
            place=place,
            last=last,
        )

    def _bytes(self, window: _Window, offsets: np.ndarray) -> np.ndarray:
        """Input offset of each token's first byte, also of tokens that begin inside a character."""
        starts = offsets[window.starts]
        parts = np.concatenate(([False], window.ends[:-1] > window.starts[1:]))[: len(starts)]
        if not parts.any() or not (self._traits.byte_letters or self._traits.byte_fallback):
            return starts
        if self._lengths is None:
            self._lengths = self._byte_lengths()
        begins = np.cumsum(self._lengths[window.ids]) - self._lengths[window.ids]
        whole = np.maximum.accumulate(np.where(parts, 0, np.arange(len(parts))))
        exact = starts[whole] + begins - begins[whole]
        inside = np.clip(exact, starts, np.maximum(starts, offsets[window.starts + 1] - 1))
        return np.where(parts, inside, starts)

    def _byte_lengths(self) -> np.ndarray:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        lengths = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
        for token, index in vocabulary.items():
            if self._traits.byte_letters:
                lengths[index] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                lengths[index] = 1
        return lengths


class _Buffer:
    """The text from the current window's beginning on, with each character's offset in the input."""

    def __init__(self, chunks: Chunks, start: int) -> None:
        self._chunks = chunks
        self._end = start
        self.text = ""
        self.offsets = np.empty(0, np.int64)

    def reaches(self, length: int) -> bool:
        """Read on until there are `length` characters. False if the input has fewer."""
        missing = length - len(self.text)
        texts, offsets = [self.text], [self.offsets]
        while missing > 0:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            texts.append(chunk[0])
            offsets.append(chunk[1])
            self._end = chunk[2]
            missing -= len(chunk[0])
        if len(texts) > 1:
            self.text, self.offsets = "".join(texts), np.concatenate(offsets)
        return missing <= 0

    def offset(self, character: int) -> int:
        return int(self.offsets[character]) if character < len(self.offsets) else self._end

    def drop(self, characters: int) -> None:
        self.text, self.offsets = self.text[characters:], self.offsets[characters:]


def _character(window: _Window, token: int) -> int:
    if token == 0:
        return 0
    return int(window.starts[token]) if token < len(window.starts) else len(window.text)
