"""A folder of checkpoints: written beside and renamed, verified when read, two kept, one run at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.outputs import unwritable

if TYPE_CHECKING:
    import torch

FORMAT = "streamh2o checkpoint 2"
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{1,12})\.json")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved. body: JSON-able. tensors: on the CPU, in memory of their own."""

    path: Path
    body: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class CheckpointFolder:
    """The checkpoints in `folder`, which is made (0700) if need be and locked until `close`.

    A checkpoint is `checkpoint-N.safetensors`, and `checkpoint-N.json` with its SHA-256, written last: without a sound
    one of these, the checkpoint does not exist. The lock is the system's, so that a killed process leaves none.
    Raises UsageError where `folder` is a file, UserError where it cannot be written or another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: set[int] = set()
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--checkpoint {folder}: this is a file; name a folder.")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._lock = os.open(folder / "lock", flags, 0o600)
        except OSError as error:
            raise unwritable(folder, error) from None
        try:
            _lock(self._lock, folder)
            for left in folder.glob(f"{_UNFINISHED}*"):
                left.unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another run have the folder."""
        os.close(self._lock)

    def _numbers(self) -> list[int]:
        """Newest first."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.folder)]
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"{self.folder}: can't be read ({reason}); choose another folder.") from None
        return sorted((int(match.group(1)) for match in found if match), reverse=True)

    @property
    def empty(self) -> bool:
        """Whether no run has saved anything here, sound or not."""
        return not self._numbers()

    def newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest sound checkpoint, None in an empty folder; `tell` hears of damaged ones.

        Raises UserError where there are checkpoints and none of them is sound.
        """
        damage: list[str] = []
        for number in self._numbers():
            try:
                checkpoint = self._load(number)
            except _Damaged as error:
                self._damaged.add(number)
                damage.append(f"checkpoint-{number} is damaged ({error})")
                continue
            for sentence in damage:
                tell(f"{self.folder}: {sentence}; checkpoint-{number} before it is taken.")
            return checkpoint
        if damage:
            raise UserError(f"{self.folder}: {'; '.join(damage)}; start anew with another folder.")
        return None

    def _load(self, number: int) -> Checkpoint:
        path = self._path(number, "json")
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            kind, digest, body = whole["format"], whole["sha256"], whole["body"]
            size, tensors_digest = body["tensors"]["bytes"], body["tensors"]["sha256"]
        except OSError as error:
            raise _Damaged((error.strerror or str(error)).lower()) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Damaged(f"{path.name} is not what was written") from None
        if kind != FORMAT:
            raise _Damaged(f"{path.name} is of another format than {FORMAT!r}")
        if digest != _digest(body):
            raise _Damaged(f"{path.name} is not what was written")
        return Checkpoint(path, body, _load_tensors(self._path(number, "safetensors"), size, tensors_digest))

    def save(self, body: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """One more checkpoint, on the disk when this returns; all but it and the newest sound one before are removed.

        body: JSON-able, without NaN. Raises UserError where it can't be written; the older ones are as they were.
        """
        numbers = self._numbers()
        number = numbers[0] + 1 if numbers else 1
        try:
            with self._beside(self._path(number, "safetensors")) as beside:
                facts = _write_tensors(beside, tensors)
            _sync_folder(self.folder)
            body = {**body, "tensors": facts}
            whole = {"format": FORMAT, "sha256": _digest(body), "body": body}
            with self._beside(self._path(number, "json")) as beside, open(beside, "wb") as file:
                file.write(json.dumps(whole, allow_nan=False).encode())
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
            sound = [old for old in numbers if old not in self._damaged][: KEPT - 1]
            for old in set(numbers) - set(sound):
                for kind in ("json", "safetensors"):
                    self._path(old, kind).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self._path(number, "json"), error) from None

    def _path(self, number: int, kind: str) -> Path:
        return self.folder / f"checkpoint-{number}.{kind}"

    @contextlib.contextmanager
    def _beside(self, path: Path) -> Iterator[Path]:
        """A private file (0600) to write, renamed to `path` in the end, or removed."""
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)
        os.close(handle)
        try:
            yield Path(name)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class _Damaged(Exception):
    """A checkpoint is not what was written; the reason, without an end."""


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write `tensors` to the disk; their size and SHA-256."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    os.chmod(path, 0o600)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": _file_digest(file)}


def _load_tensors(path: Path, size: Any, digest: Any) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.stat().st_size != size:
            raise _Damaged(f"{path.name} has {path.stat().st_size} bytes, {size} were written")
        with open(path, "rb") as file:
            if _file_digest(file) != digest:
                raise _Damaged(f"{path.name} is not what was written")
        # A copy: what the file is mapped to may change with it, and lies at any address.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise _Damaged(f"{path.name}: {(error.strerror or str(error)).lower()}") from None
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise _Damaged(f"{path.name} holds no tensors") from None


def _file_digest(file: Any) -> str:
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    """Lock the open file `handle` until it is closed. Raises UserError where another process has done so."""
    try:
        try:
            import fcntl
        except ImportError:
            import msvcrt  # Windows

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{folder}: another run is using this folder; wait for it, or name another.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{folder}: can't be locked ({reason}); choose a folder on a local disk.") from None
