"""Bytes of an input that was read before: from its file, or from a copy made while it was read."""

from __future__ import annotations

import os
import tempfile
import threading
from types import TracebackType
from typing import IO, Any, BinaryIO, cast

from streamh2o.errors import UserError
from streamh2o.text.sources import Source, open_source

_BLOCK = 1 << 20


class Rereadable:
    """Wraps `source` so that its bytes can be read a second time by their offsets.

    A file is opened again. Anything else (a pipe, a compressed file, a dataset) is copied, decompressed, to a temporary
    file that no other user may read and that has no name where the system allows it (Linux, macOS): it is gone with
    this process, however that ends. Read the text through `source` of this object, not the one given.
    """

    def __init__(self, source: Source, folder: str | os.PathLike[str] | None = None) -> None:
        self._original = source
        self._copy: IO[bytes] | None = None
        self._lock = threading.Lock()
        self.source = source
        if source.size is None:
            try:
                self._copy = tempfile.TemporaryFile(prefix="streamh2o-", dir=folder)  # noqa: SIM115 (until `close`)
            except OSError as error:
                raise UserError(
                    f"{source.name}: no temporary file can be made to keep a copy in ({error.strerror}); set TMPDIR to "
                    "a folder with space."
                ) from None
            self.source = Source(source.name, None, self._open)

    def __enter__(self) -> Rereadable:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the copy."""
        if self._copy is not None:
            self._copy.close()

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, _Tee(self._original.open(), self))

    def _append(self, data: bytes) -> None:
        assert self._copy is not None
        with self._lock:
            try:
                self._copy.seek(0, os.SEEK_END)
                self._copy.write(data)
                self._copy.flush()
            except OSError as error:
                raise UserError(
                    f"{self.source.name}: the temporary copy in {tempfile.gettempdir()} can't be written "
                    f"({(error.strerror or str(error)).lower()}); set TMPDIR to a folder with space."
                ) from None

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of the input, fewer where it ends before. Raises UserError where it can't be read."""
        start = max(0, start)
        try:
            if self._copy is not None:
                with self._lock:
                    self._copy.seek(start)
                    return self._copy.read(max(0, end - start))
            with open_source(self.source) as file:
                file.seek(start)
                return _read_all(file, max(0, end - start))
        except OSError as error:
            raise UserError(
                f"{self.source.name}: can't be read again ({(error.strerror or str(error)).lower()}); it must stay in "
                "place until the answers are there."
            ) from None

    def lines(self, offsets: list[int]) -> dict[int, int]:
        """The line, counted from 1, on which each byte offset lies."""
        result: dict[int, int] = {}
        line, position = 1, 0
        for offset in sorted(set(offsets)):
            while position < offset:
                data = self.read(position, min(offset, position + _BLOCK))
                if not data:
                    break
                line += data.count(b"\n")
                position += len(data)
            result[offset] = line
        return result


def _read_all(file: Any, size: int) -> bytes:
    """An unbuffered file may give less than asked for."""
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Tee:
    """A binary stream that keeps a copy of whatever is read."""

    def __init__(self, stream: BinaryIO, copy: Rereadable) -> None:
        self._stream, self._copy = stream, copy

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._copy._append(data)
        return data

    def __enter__(self) -> _Tee:
        self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, trace)
