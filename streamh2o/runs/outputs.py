"""Files that a run leaves: checked before it starts, written so that what is there is always whole."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streamh2o.errors import UsageError, UserError


def unwritable(path: str | os.PathLike[str], error: OSError) -> UserError:
    """The sentence for a file that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    return UserError(f"{os.fspath(path)}: can't be written ({reason}); free some space or choose another place.")


def is_stdout(path: Path | None) -> bool:
    """Whether an option's FILE is `-`, which stands for standard output."""
    return path is not None and str(path) == "-"


def check_outputs(outputs: dict[str, Path | None], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse, before hours are spent, what would fail at the end or destroy something.

    outputs: the option's name to the file it writes. inputs: files and folders that must survive (`-`: standard
    input). Raises UsageError naming the option, for a missing folder, a folder as file, an input, a file named twice.
    """
    protected = [status for name in inputs if (status := _status(name)) is not None]
    taken: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or is_stdout(path):
            continue
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(path)
        except (OSError, ValueError) as error:  # too long, or holds what no name may
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{option} {str(path)[:60]}: not a possible file name ({reason.lower()}).") from None
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first.")
        if path.is_dir():
            raise UsageError(f"{option} {path}: this is a folder; name a file in it.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{option} {path}: may not be written; change its permissions or choose another place.")
        real = os.path.realpath(path)
        here = [path.stat(), path.parent.stat()] if path.is_file() else []
        if any(os.path.samestat(mine, status) for mine in here for status in protected):
            raise UsageError(f"{option} {path}: this would overwrite an input or the model; choose another name.")
        if real in taken and not real.startswith("/dev/"):
            raise UsageError(f"{option} and {taken[real]} both name {path}; give them different files.")
        taken[real] = option


def _status(name: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.fstat(sys.stdin.fileno()) if os.fspath(name) in ("-", "stdin") else os.stat(name)
    except (OSError, ValueError, AttributeError):  # not a file: a dataset, a model's name, a closed stdin
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is never seen half-written. Raises UserError where that fails."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_bytes(data)
            return
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def json_lines(results: Iterable[dict[str, Any]]) -> str:
    """One JSON object a line, so that one input gives plain JSON and several can be read one by one."""
    return "".join(json.dumps(result, allow_nan=False) + "\n" for result in results)


def make_folder(folder: Path) -> None:
    """Make `folder`, and see that it can be written to before hours are spent. Raises UserError where it can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{folder}: can't be written to ({reason}); choose another --out.") from None
