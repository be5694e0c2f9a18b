"""What a caller gives as a text (a path, an open file, pieces of text, the text itself) as a source."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from streamh2o.errors import UsageError, UserError
from streamh2o.text.sources import ByteStream, Source, open_inputs

Input = str | os.PathLike[str] | io.IOBase | Iterable[str | bytes]
_READ = 1 << 16  # characters or bytes taken from an open file at once
_LONGEST_PATH = 4096


def to_source(
    input: Input | None = None, text: str | None = None, function: str = "This function", literal: str = "text"
) -> Source:
    """The one text that is given: by `input`, or literally by `text`, which the function calls `literal`.

    input: a path (`.gz`, `.xz`, `-` and `hf:DATASET:SPLIT` as on the command line), an open file, text or binary, which
    is read from where it stands and left open, or an iterable of pieces of text, cut anywhere. Raises UsageError where
    none or both are given, or `input` names several files; UserError for a path that cannot be read.
    """
    if (input is None) == (text is None):
        raise UsageError(
            f"{function} takes one text: a path, an open file or an iterable as input, or else {literal}=."
        )
    if text is not None:
        if not isinstance(text, str):
            raise UsageError(f"{literal}= is a str, not {type(text).__name__}.")
        data = _encode(text)
        return Source(literal, len(data), lambda: io.BytesIO(data))
    sources = to_sources([cast(Input, input)], literal)
    if len(sources) != 1:
        raise UsageError(f"{input}: {len(sources)} files match, and {function} takes one; name one.")
    return sources[0]


def to_sources(inputs: Input | Iterable[Input], literal: str = "text") -> list[Source]:
    """A source for each of `inputs`, which are as in `to_source`; a pattern gives one for every file that matches."""
    if isinstance(inputs, str | os.PathLike) or hasattr(inputs, "read"):
        inputs = [cast(Input, inputs)]
    if not isinstance(inputs, Iterable):
        raise UsageError(f"inputs are one or several paths, open files or iterables, not {type(inputs).__name__}.")
    sources: list[Source] = []
    for number, given in enumerate(cast(Iterable[Input], inputs), 1):
        if isinstance(given, str | os.PathLike):
            sources += open_inputs([_path(given, literal)])
        elif hasattr(given, "read"):
            name = getattr(given, "name", None)
            sources.append(_once(name if isinstance(name, str) else f"input {number}", _file_pieces(given)))
        elif isinstance(given, Iterable) and not isinstance(given, bytes):
            sources.append(_once(f"input {number}", _pieces(given)))
        else:
            kind = type(given).__name__
            raise UsageError(f"An input is a path, an open file or an iterable of pieces of text, not {kind}.")
    return sources


def _path(given: str | os.PathLike[str], literal: str) -> str:
    path = os.fspath(given)
    if "\n" in path or len(path) > _LONGEST_PATH:
        raise UsageError(f"The input is a path, and this looks like a text; give it as {literal}=.")
    return path


def _once(name: str, pieces: Iterator[bytes]) -> Source:
    """A source that can be opened once."""
    waiting = [pieces]

    def open_it() -> BinaryIO:
        if not waiting:
            raise UserError(f"{name}: was read already, and an open file or an iterable can be read only once.")
        return cast(BinaryIO, ByteStream(waiting.pop()))

    return Source(name, None, open_it)


def _file_pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_READ):
        yield _encode(piece)


def _pieces(pieces: Iterable[Any]) -> Iterator[bytes]:
    for piece in pieces:
        yield _encode(piece)


def _encode(piece: Any) -> bytes:
    """UTF-8. Half a surrogate pair comes out as bytes that UTF-8 forbids, and is reported like any other bad byte."""
    if isinstance(piece, str):
        return piece.encode("utf-8", "surrogatepass")
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    raise UserError(f"A piece of text is a str (or bytes in UTF-8), not {type(piece).__name__}.")
