"""Files that grow with a run: the log, the losses, the transcript."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.outputs import unwritable

if TYPE_CHECKING:
    from streamh2o.runs.progress import Progress

_NPY_HEADER = 128  # bytes; room for any count
_NEWEST = 4096  # bytes by which a file is known again
LOG_FIELDS = ("token", "byte", "nll", "n", "ppl", "ppl_window", "tokens_per_second", "rss_bytes", "slots")


class GrowingFile:
    """A file that grows with the run; every chunk is handed to the system before the next one is computed.

    mark: what `mark` gave in an earlier run; the file is cut back to that place and goes on from there.
    Raises UserError where it cannot be written, or is not that file.
    """

    _header = 0  # bytes at the beginning that change

    def __init__(self, path: Path, mark: dict[str, Any] | None = None) -> None:
        self.path = path
        self.failed = False
        self._newest = b""
        try:
            if not mark and path.is_symlink() and path.parts[:2] != ("/", "dev"):
                path.unlink()  # a link is replaced, as `write_whole` does; what it points to may be somebody else's
            self._file: BinaryIO = open(path, "r+b" if mark else "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise unwritable(path, error) from None
        if mark:
            try:
                self._cut_back(int(mark["bytes"]), mark["newest"])
            except BaseException:
                self._file.close()
                raise

    def _cut_back(self, size: int, digest: str) -> None:
        try:
            have = self._file.seek(0, os.SEEK_END)
            if have < size:
                raise UserError(
                    f"{self.path}: has {have} bytes, and had {size} at the checkpoint; put it back, or start anew."
                )
            start = max(self._header, size - _NEWEST)
            self._file.seek(start)
            self._newest = self._file.read(max(0, size - start))
            if _sha256(self._newest) != digest:
                raise UserError(f"{self.path}: is not the file of the checkpoint; put it back, or start anew.")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def mark(self) -> dict[str, Any]:
        """Where the file stands, once that much of it is on the disk: its size and a digest of its newest bytes."""
        try:
            os.fsync(self._file.fileno())
            return {"bytes": self._file.tell(), "newest": _sha256(self._newest)}
        except OSError as error:
            raise unwritable(self.path, error) from None

    def _append(self, data: bytes) -> None:
        self._write(data)
        self._newest = (self._newest + data)[-_NEWEST:]

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failed = True
            raise unwritable(self.path, error) from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise unwritable(self.path, error) from None

    def __exit__(self, *exc: object) -> None:
        self.close()


class LogWriter(GrowingFile):
    """`--log`: one JSON object a chunk.

    token, byte: tokens and bytes of the input so far. nll: sum of the chunk's losses in nats, n: how many. ppl,
    ppl_window: over all tokens so far, and over the last ones. slots: held after the chunk. With `several` inputs each
    line names its `input`.
    """

    def __init__(self, path: Path, several: bool = False, mark: dict[str, Any] | None = None) -> None:
        super().__init__(path, mark)
        self._several = several

    def __enter__(self) -> LogWriter:
        return self

    def __call__(self, progress: Progress) -> None:
        line: dict[str, Any] = {"input": progress.name} if self._several else {}
        line |= {field: getattr(progress, field) for field in LOG_FIELDS}
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")


class LossWriter(GrowingFile):
    """`--nll-out`: the losses as a NumPy array, float32 [scored], in nats; those of several inputs follow one another.

    It grows on disk, not in memory, and its header is corrected after every chunk: it can be loaded at any time.
    """

    _header = _NPY_HEADER

    def __init__(self, path: Path, mark: dict[str, Any] | None = None) -> None:
        if path.exists() and not path.is_file():
            raise UsageError(f"--nll-out {path}: this is no plain file, and the array's header is written last.")
        super().__init__(path, mark)
        self.count = (self._file.tell() - _NPY_HEADER) // 4 if mark else 0
        self._write_header()

    def __enter__(self) -> LossWriter:
        return self

    def __call__(self, progress: Progress) -> None:
        self._append(progress.losses.astype("<f4").tobytes())
        self.count += progress.n
        self._write_header()

    def _write_header(self) -> None:
        self._file.seek(0)
        self._write(_npy_header(self.count))
        self._file.seek(0, os.SEEK_END)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _npy_header(count: int) -> bytes:
    """The header of NumPy's format 1.0 for float32 [count], padded to one length for every count."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},), }}".encode()
    prefix = b"\x93NUMPY\x01\x00" + (_NPY_HEADER - 10).to_bytes(2, "little")
    return prefix + text.ljust(_NPY_HEADER - 11) + b"\n"
