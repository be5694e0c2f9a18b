"""Token ids of one input, read in a thread ahead of the model, with a state to resume from."""

import hashlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from streamh2o.errors import UsageError, UserError
from streamh2o.text.sources import Source, open_source, read_block
from streamh2o.text.tokenize import WINDOW, Piece, Place, WindowTokenizer
from streamh2o.text.utf8 import Utf8Decoder

READ_BYTES = 65_536
PIECES_AHEAD = 4  # of up to WINDOW characters each


class Block(NamedTuple):
    """ids: int64 [n]. byte_offset: offset in the input (decompressed) of each token's first byte, int64 [n]."""

    ids: np.ndarray
    byte_offset: np.ndarray


class _Part(NamedTuple):
    piece: Piece
    raw: bytes  # the input's bytes from the previous piece's end to this one's


class TokenReader:
    """Ids of `source` in blocks, in bounded memory. They are those of tokenising the whole text at once.

    tokenizer: a fast `transformers` tokenizer, or a `tokenizers.Tokenizer` (which knows no BOS).
    errors, newline: see `Utf8Decoder`. allow_special, `exact`: see `WindowTokenizer`.
    bos: "auto" puts a BOS first if the tokenizer itself would, "yes", "no"; an empty input gets none.
    max_tokens: the most tokens to give, without the BOS. Reading stops soon after them.
    read_ahead: read in a separate thread.
    state: the `state` of an earlier reader of the same input. Reading goes on from there. The bytes before are read
        again and compared by hash. Standard input has to be piped in again.

    What was handed out so far, all int: `tokens` (without BOS), `bytes_read` and `words_read` (bytes and words of
    the text that these tokens cover; the whole input once `complete`), and `sha256` of these bytes. An input that
    can't be read, is not UTF-8, or is not the input of `state` raises UserError from `read` or `blocks`.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any,
        *,
        errors: str = "strict",
        newline: str = "keep",
        bos: str = "auto",
        max_tokens: int | None = None,
        allow_special: bool = False,
        read_ahead: bool = True,
        state: dict[str, Any] | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"--max-tokens {max_tokens}: must be at least 1")
        self.source = source
        window = WINDOW if max_tokens is None else min(WINDOW, max(1024, 8 * max_tokens))
        self._tokenizer = WindowTokenizer(tokenizer, allow_special=allow_special, window=window)
        self._place = Place(*state["place"]) if state and state["place"] else None
        self._decoder = Utf8Decoder(source.name, errors, newline, self._place.byte if self._place else 0)
        self._bos = bos_id(tokenizer, bos)
        self._allow_special = allow_special
        self._max_tokens = max_tokens
        self._start = state
        self.tokens: int = state["tokens"] if state else 0
        self.words_read: int = state["words"] if state else 0
        self.bytes_read: int = state["bytes"] if state else 0
        self.bos_added: bool = state["bos_added"] if state else False
        self.complete = False
        self._hash = hashlib.sha256()
        self._state = state or self._snapshot(None)
        self._head = self._tail = b""  # first and last bytes handed out
        self._part: _Part | None = None
        self._given = 0  # tokens of the current part handed out
        self._hashed = 0  # bytes of the current part hashed
        self._undecodable: UserError | None = None  # raised once the text before it has been handed out
        self._failure: UserError | None = None  # raised by every further `read`
        self._stop = threading.Event()
        self._parts = self._read_ahead() if read_ahead else self._make_parts()

    def __enter__(self) -> "TokenReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def exact(self) -> bool:
        """Whether the ids are surely those of the whole text tokenised at once. It can turn False while reading."""
        return self._tokenizer.exact

    @property
    def sha256(self) -> str:
        """Hex digest of the first `bytes_read` bytes of the input."""
        return self._hash.hexdigest()

    @property
    def split_words(self) -> int:
        """How many parts `re.split` on white space gives, an empty one at either end included."""
        before = self._head.decode("utf-8-sig", "ignore")[:1].isspace()
        after = self._tail.decode("utf-8", "ignore")[-1:].isspace()
        return (self.words_read + before + after) if self.words_read else 1 + before

    def close(self) -> None:
        """Stop reading. Does not wait for a pipe: a thread that is blocked on one ends with the process."""
        self._stop.set()
        self._parts.close()

    def blocks(self, size: int) -> Iterator[Block]:
        """Blocks of `size` tokens. The last one may be shorter. A BOS counts as a token here."""
        while (block := self.read(size)) is not None:
            yield block

    def read(self, size: int) -> Block | None:
        """The next `size` tokens, fewer at the end, None after it.

        Raises UserError where the input cannot be read on, after every token before that place has been handed out.
        """
        if self._failure is not None:
            raise self._failure
        ids: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        while size > 0:
            try:
                if not self._advance():
                    break
            except UserError as error:
                self._failure = error
                if not ids:
                    raise
                break
            assert self._part is not None
            piece = self._part.piece
            if self.tokens == 0 and not self.bos_added and self._wants_bos(piece):
                self.bos_added = True
                ids.append(np.array([self._bos], np.int64))
                starts.append(np.zeros(1, np.int64))
                size -= 1
            count = min(size, len(piece.ids) - self._given)
            if self._max_tokens is not None:
                count = min(count, self._max_tokens - self.tokens)
            ids.append(piece.ids[self._given : self._given + count])
            starts.append(piece.starts[self._given : self._given + count])
            self._take(count)
            size -= count
        return Block(np.concatenate(ids), np.concatenate(starts)) if ids else None

    def state(self) -> dict[str, Any]:
        """What was given so far, and where tokenising goes on, as values of JSON. Without what was only read ahead."""
        return dict(self._state)

    def _advance(self) -> bool:
        """Go to the next part with a token to give. False at the end."""
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            if self._start and self._part is None:  # whether the input is the same shows when it is read again
                next(self._parts, None)
            self.close()
        if self._stop.is_set():
            return False
        while self._part is None or self._given == len(self._part.piece.ids):
            part = next(self._parts, None)
            if part is None:
                return False
            self._part, self._given, self._hashed = part, 0, 0
            if len(part.piece.ids) == 0:
                self._take(0)
        return True

    def _take(self, count: int) -> None:
        assert self._part is not None
        piece, raw = self._part
        start = self.bytes_read - self._hashed
        self._given += count
        self.tokens += count
        ended = self._given == len(piece.ids)
        self.bytes_read = piece.end if ended else int(piece.starts[self._given])
        self.words_read = piece.end_words if ended else int(piece.words[self._given])
        taken = raw[self._hashed : self.bytes_read - start]
        self._hash.update(taken)
        self._head = (self._head + taken[:8])[:8]
        self._tail = (self._tail + taken[-8:])[-8:]
        self._hashed = self.bytes_read - start
        self.complete = ended and piece.last and self._undecodable is None
        if count:  # text without tokens, such as blanks that a tokenizer drops, is read again
            self._state = self._snapshot(piece.place._replace(skip=piece.place.skip + self._given))

    def _snapshot(self, place: Place | None) -> dict[str, Any]:
        return {
            "place": list(place) if place else None,
            "tokens": self.tokens,
            "words": self.words_read,
            "bytes": self.bytes_read,
            "sha256": self.sha256,
            "bos_added": self.bos_added,
        }

    def _wants_bos(self, piece: Piece) -> bool:
        return self._bos is not None and not (self._allow_special and int(piece.ids[0]) == self._bos)

    def _make_parts(self) -> Generator[_Part, None, None]:
        raw = bytearray()
        produced, end = self.tokens, self.bytes_read
        with open_source(self.source) as handle:
            chunks = self._chunks(handle, raw)
            for piece in self._tokenizer.pieces(chunks, self._place, self.words_read):
                yield _Part(piece, bytes(raw[: piece.end - end]))
                del raw[: piece.end - end]
                end = piece.end
                produced += len(piece.ids)
                if self._max_tokens is not None and produced >= self._max_tokens:
                    return
        if self._undecodable is not None:
            raise self._undecodable

    def _chunks(self, handle: BinaryIO, raw: bytearray) -> Iterator[tuple[str, np.ndarray, int]]:
        """Text from the starting place on. Every byte that was not given before goes into `raw`."""
        decoder, known = self._decoder, self.bytes_read
        begin, position = decoder.offset, 0
        while data := read_block(self.source, handle, READ_BYTES):
            old = data[: max(0, known - position)]
            if old:
                self._hash.update(old)
                if position + len(old) == known:
                    self._check_prefix()
            raw += data[len(old) :]
            skipped = max(0, begin - position)
            position += len(data)
            if skipped < len(data):
                if (decoded := self._decode(data[skipped:])) is None:
                    return
                yield decoded
        if position < known:
            raise UserError(
                f"{self.source.name}: ends after {position} bytes, but {known} had been read before; "
                "resume with the same input"
            )
        if (decoded := self._decode(b"", final=True)) is not None:
            yield decoded

    def _decode(self, data: bytes, final: bool = False) -> tuple[str, np.ndarray, int] | None:
        """What `data` completes; None where it is not UTF-8, which ends the text as if the input had ended there."""
        try:
            text, offsets = self._decoder.feed(data, final)
        except UserError as error:
            self._undecodable = error
            return None
        return text, offsets, self._decoder.offset

    def _check_prefix(self) -> None:
        assert self._start is not None
        if self._hash.hexdigest() != self._start["sha256"]:
            raise UserError(
                f"{self.source.name}: its first {self._start['bytes']} bytes are not those read before; "
                "resume with the same input, or start anew"
            )

    def _read_ahead(self) -> Generator[_Part, None, None]:
        parts: queue.Queue[_Part | BaseException | None] = queue.Queue(PIECES_AHEAD)

        def put(item: _Part | BaseException | None) -> bool:
            while not self._stop.is_set():
                try:
                    parts.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def work() -> None:
            try:
                for part in self._make_parts():
                    if not put(part):
                        return
                put(None)
            except BaseException as error:  # it belongs to whoever reads
                put(error)

        thread = threading.Thread(target=work, name=f"reader of {self.source.name}", daemon=True)
        thread.start()
        try:
            while (part := parts.get()) is not None:
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self._stop.set()
            thread.join(timeout=0.3)


def bos_id(tokenizer: Any, bos: str) -> int | None:
    """The id to put first, or None. "auto" does what the tokenizer does by itself."""
    if bos not in ("auto", "yes", "no"):
        raise UsageError(f"--bos {bos}: must be auto, yes or no")
    index = getattr(tokenizer, "bos_token_id", None)
    if bos == "no":
        return None
    if bos == "yes":
        if index is None:
            raise UsageError("--bos yes: this model's tokenizer has no BOS token; use --bos auto or no")
        return index
    if index is None:
        return None
    own = tokenizer("a").input_ids[:1] == [index]
    return index if own and tokenizer("a", add_special_tokens=False).input_ids[:1] != [index] else None
