"""Bytes to text, a block at a time, where every character keeps the offset of its first byte in the input."""

import codecs
import threading

import numpy as np

from streamh2o.errors import UsageError, UserError

_BOM = codecs.BOM_UTF8
_local = threading.local()


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Python's own `replace`, which also notes the span of bytes that each U+FFFD stands for."""
    assert isinstance(error, UnicodeDecodeError)
    _local.spans.append((error.start, error.end))
    return "\ufffd", error.end


codecs.register_error("streamh2o-replace", _replace)


class Utf8Decoder:
    """Incremental UTF-8 to text with byte offsets.

    errors: "strict" raises UserError at the first byte that is not UTF-8, after the text before it was given out;
    "replace" puts U+FFFD, as `bytes.decode(errors="replace")` does.
    newline: "keep", or "lf" to turn CR LF into LF (its offset is that of the CR; a lone CR stays).
    start: offset of the first byte in the input. A byte order mark is dropped only at 0.
    """

    def __init__(self, name: str, errors: str = "strict", newline: str = "keep", start: int = 0) -> None:
        if errors not in ("strict", "replace"):
            raise UsageError(f"--errors {errors}: must be strict or replace.")
        if newline not in ("keep", "lf"):
            raise UsageError(f"--newline {newline}: must be keep or lf.")
        self._name = name
        self._handler = "streamh2o-replace" if errors == "replace" else "strict"
        self._lf = newline == "lf"
        self._held = b""
        self._offset = start
        self._at_start = start == 0
        self._error: UserError | None = None

    @property
    def offset(self) -> int:
        """Offset in the input of the first byte that has not come out as text yet."""
        return self._offset

    def feed(self, data: bytes, final: bool = False) -> tuple[str, np.ndarray]:
        """The text that `data` completes, and the input offset of each of its characters, int64 [characters].

        final: no more bytes follow, so that an unfinished character is an error, raised at once.
        """
        if self._error is not None:
            raise self._error
        data = self._held + data if self._held else data
        self._held = b""
        if self._at_start:
            if len(data) < len(_BOM) and _BOM.startswith(data) and not final:
                self._held = data
                return "", np.empty(0, np.int64)
            self._at_start = False
            if data.startswith(_BOM):
                data = data[len(_BOM) :]
                self._offset += len(_BOM)
        _local.spans = []
        try:
            text, used = codecs.utf_8_decode(data, self._handler, final)
        except UnicodeDecodeError as error:
            text, used = data[: error.start].decode("utf-8"), error.start
            self._error = self._describe(error, final)
            if final:
                raise self._error from None
        if self._lf and not final and text.endswith("\r"):
            text, used = text[:-1], used - 1
        offsets = _offsets(data[:used], len(text), _local.spans) + self._offset
        self._held = data[used:]
        self._offset += used
        if self._lf and "\r\n" in text:
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            tail = (codes[1:] == 0x0A) & (codes[:-1] == 0x0D)
            offsets = offsets[np.concatenate(([True], ~tail))]
            text = text.replace("\r\n", "\n")
        return text, offsets

    def _describe(self, error: UnicodeDecodeError, final: bool) -> UserError:
        offset = self._offset + error.start
        if final and error.reason == "unexpected end of data":
            problem = f"the input ends inside a UTF-8 character that begins at byte {offset}"
        else:
            problem = f"byte {offset} (0x{error.object[error.start]:02x}) is not UTF-8"
        return UserError(f"{self._name}: {problem}; convert the text to UTF-8, or go on with --errors replace")


def _offsets(data: bytes, characters: int, replaced: list[tuple[int, int]]) -> np.ndarray:
    """Index in `data` of the first byte of each character; `replaced` spans of bytes are one character each."""
    if len(data) == characters and not replaced:
        return np.arange(characters, dtype=np.int64)
    begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    if replaced:
        spans = np.array(replaced, np.int64)
        for distance in range(int((spans[:, 1] - spans[:, 0]).max())):
            inside = spans[:, 0] + distance
            begins[inside[inside < spans[:, 1]]] = distance == 0
    return np.flatnonzero(begins).astype(np.int64)
