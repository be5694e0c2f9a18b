"""Inputs that the user names (files, globs, stdin, compressed files, datasets) as binary streams."""

import glob
import gzip
import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from streamh2o.errors import UserError
from streamh2o.extras import require_package

DOCUMENT_SEPARATOR = b"\n\n"
_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "test", "eval", "all"}


@dataclass(frozen=True)
class Source:
    """One input: `name` as shown to the user, `size` in bytes (None where unknown), `open()` a new stream.

    Standard input can be opened once; every other source can be opened again and gives the same bytes.
    """

    name: str
    size: int | None
    open: Callable[[], BinaryIO]


def open_inputs(names: Iterable[str | os.PathLike[str]], rows: bool = False) -> list[Source]:
    """The sources that `names` stand for, in the order given, a glob's files sorted.

    A name is a file, a glob (`books/*.txt`, `**` for any depth), `-` for standard input, or
    `hf:DATASET[:CONFIG]:SPLIT[:COLUMN]`. Files ending in .gz and .xz are decompressed. Nothing is read yet, but
    what can be seen to be wrong raises UserError: a missing or unreadable file, a folder, a glob without files.
    rows: make every row of a data set that holds text a source of its own; then these are read now, and kept.
    """
    sources: list[Source] = []
    for given in names:
        name = os.fspath(given)
        if name == "-":
            if any(source.name == "stdin" for source in sources):
                raise UserError("standard input (-) was named twice, but can be read only once; name it once")
            sources.append(Source("stdin", None, _open_stdin))
        elif name.startswith("hf:") and rows:
            sources.extend(_dataset_rows(name))
        elif name.startswith("hf:"):
            sources.append(_dataset(name))
        elif os.path.lexists(name) or not glob.has_magic(name):
            sources.append(_file(name))
        else:
            files = [path for path in sorted(glob.glob(name, recursive=True)) if not os.path.isdir(path)]
            if not files:
                raise UserError(f"{name}: no file matches this pattern; check the spelling and the folder")
            sources.extend(_file(path) for path in files)
    return sources


def open_source(source: Source) -> BinaryIO:
    """`source.open()`, where any failure is a UserError."""
    try:
        return source.open()
    except (OSError, EOFError) as error:
        raise _unreadable(source, error) from None


def read_block(source: Source, stream: BinaryIO, size: int) -> bytes:
    """At most `size` bytes, as soon as there are any; none at the end. Any failure is a UserError."""
    try:
        return stream.read(size)
    except UserError:
        raise
    except Exception as error:  # each decompressor has exceptions of its own
        raise _unreadable(source, error) from None


def _unreadable(source: Source, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(f"{source.name}: can't be read ({reason}); check that the file is whole")


def _file(path: str) -> Source:
    try:
        info = os.stat(path)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise UserError(f"{path}: {reason}; check the spelling and the folder") from None
    except ValueError:
        raise UserError(f"{path!r}: not a possible file name; check the spelling") from None
    if stat.S_ISDIR(info.st_mode):
        raise UserError(f"{path}: a folder, not a file; name its files, for example {os.path.join(path, '*.txt')}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: may not be read; change its permissions or copy it")
    opener: Any
    if path.endswith(".gz"):
        opener = partial(gzip.open, path, "rb")
    elif path.endswith(".xz"):
        import lzma

        opener = partial(lzma.open, path, "rb")
    else:
        plain = stat.S_ISREG(info.st_mode)
        return Source(path, info.st_size if plain else None, lambda: open(path, "rb", buffering=0))
    return Source(path, None, opener)


def _open_stdin() -> BinaryIO:
    # Below the buffer of sys.stdin: a thread that waits inside that buffer's lock would abort the interpreter
    # when it shuts down.
    stream = sys.stdin.buffer
    try:
        return open(stream.fileno(), "rb", buffering=0, closefd=False)
    except io.UnsupportedOperation:  # not a real file, for example when called from Python
        return stream


def _dataset(name: str) -> Source:
    parts = _dataset_parts(name)
    return Source(name, None, lambda: io.BufferedReader(ByteStream(_joined(_documents(name, *parts)))))


def _dataset_rows(name: str) -> list[Source]:
    """A source named NAME#ROW, counted from 0, for every row of a data set that holds text."""
    sources = []
    for number, document in enumerate(_documents(name, *_dataset_parts(name))):
        if document:
            data = document.encode("utf-8", "surrogatepass")
            sources.append(Source(f"{name}#{number}", len(data), partial(io.BytesIO, data)))
    if not sources:
        raise UserError(f"{name}: no row of this data set holds text; check its column")
    return sources


def _dataset_parts(name: str) -> tuple[str, str | None, str, str | None]:
    """Data set, config, split and column of an `hf:` name; of three parts the middle one is the split or a config."""
    require_package("datasets", name)
    dataset, *rest = name.removeprefix("hf:").split(":")
    if not dataset or not 1 <= len(rest) <= 3 or not all(rest):
        raise UserError(f"{name}: not a dataset; write hf:DATASET[:CONFIG]:SPLIT[:COLUMN], as in hf:pg19:test:text")
    if len(rest) == 1:
        config, split, column = None, rest[0], None
    elif len(rest) == 3:
        config, split, column = rest[0], rest[1], rest[2]
    elif rest[1] in _SPLITS and rest[0] not in _SPLITS:
        config, split, column = rest[0], rest[1], None
    else:
        config, split, column = None, rest[0], rest[1]
    return dataset, config, split, column


class ByteStream(io.RawIOBase):
    """An iterator of bytes as a binary stream. It holds one piece at a time."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _joined(documents: Iterable[str | None]) -> Iterator[bytes]:
    """The documents of a dataset's text column in UTF-8, a blank line between two documents.

    A lone surrogate comes out as the bytes that UTF-8 forbids, so that it is reported or replaced like any other bad
    byte.
    """
    separator = b""
    for document in documents:
        if document is not None:
            yield separator + document.encode("utf-8", "surrogatepass")
            separator = DOCUMENT_SEPARATOR


def _documents(name: str, dataset: str, config: str | None, split: str, column: str | None) -> Iterator[str | None]:
    """The text of each row, None where it has none."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # failures are said once, by the UserError
    try:
        rows = iter(datasets.load_dataset(dataset, config, split=split, streaming=True))
        first = next(rows, None)
    except Exception as error:  # the library raises a different class for nearly every cause
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{name}: this dataset can't be opened ({reason[0].rstrip('.')}); check its name, config and split"
        ) from None
    if first is None:
        return
    column = _column(name, first, column)
    while first is not None:
        text = first.get(column)
        if text is not None and not isinstance(text, str):
            raise UserError(f"{name}: column {column!r} holds {type(text).__name__}, not text; name a column of text")
        yield text
        try:
            first = next(rows, None)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"{name}: reading the dataset failed ({reason[0]}); check its files") from None


def _column(name: str, row: dict[str, Any], column: str | None) -> str:
    listed = ", ".join(row)
    if column is not None:
        if column not in row:
            raise UserError(f"{name}: no column {column!r} in this dataset; it has {listed}")
        return column
    texts = [key for key, value in row.items() if isinstance(value, str)]
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise UserError(f"{name}: which column is the text? Put one of these at the end, after a colon: {listed}")
    return texts[0]
