"""A GGUF file as a folder of safetensors: dequantised once, then read in a moment.

Weights are kept in float32, which holds every value of a GGUF block exactly; bfloat16 would round those of 4-bit
blocks, whose scale and minimum are float16.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamh2o.cache.families import require_supported
from streamh2o.errors import UserError
from streamh2o.machine import cache_home
from streamh2o.models.gguf.header import GgufHeader, read_header
from streamh2o.models.gguf.tokenizer import byte_level_tokenizer
from streamh2o.versions import __version__

LAYOUT = 3  # raise when the same file would be unpacked or packed differently
MARK = "streamh2o.json"  # written last: what the folder was made from, and the size of each of its files
STALE_SECONDS = 24 * 3600
_PACKED = "-packed"  # after the name of the folder beside which the blocks lie


@dataclass(frozen=True)
class CachedGguf:
    """One dequantised model on disk. source: the GGUF file it was made from. size: bytes of the folder."""

    folder: Path
    source: Path
    size: int


def models_home() -> Path:
    return cache_home() / "models"


def cached_folder(path: Path) -> Path:
    """Where the unpacked `path` lies or would lie: its name, size, date, our version and its place make the key."""
    real = path.resolve()
    try:
        stat = real.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    place = hashlib.sha256(f"{real}\n{LAYOUT}".encode()).hexdigest()[:8]
    return models_home() / f"{real.stem[:80]}-{stat.st_size}-{stat.st_mtime_ns}-{__version__}-{place}"


def cached_packed(path: Path) -> Path:
    """Where the blocks of `path` lie or would lie, for `--weights packed`."""
    folder = cached_folder(path)
    return folder.with_name(folder.name + _PACKED)


def safetensors_folder(path: Path, tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with the weights and tokenizer of the GGUF file `path`, made now where it is not there yet.

    tell: called with one line before the slow first time. Several processes may do this at once: the first to finish
    wins. Raises UserError where the file is damaged, its architecture is not supported or the cache cannot be written.
    """
    folder = cached_folder(path)
    if read_mark(folder):
        return folder
    header = read_header(path)
    tell(f"Unpacking {path.name} into the cache, once ...")
    with building(folder) as unfinished:
        _unpack(path, header, unfinished)
        write_mark(unfinished, path)
    return folder


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What `folder` was made from, or None where it is not there or not whole."""
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in mark["files"].items()):
            return mark
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def list_cached() -> list[CachedGguf]:
    """The dequantised models in the cache, by name; the size is with the blocks beside them."""
    try:
        folders = sorted(models_home().iterdir())
    except OSError:
        return []
    sizes = {folder: (mark, sum(mark["files"].values())) for folder in folders if (mark := read_mark(folder))}
    packed = {folder.name.removesuffix(_PACKED): size for folder, (_, size) in sizes.items() if _is_packed(folder)}
    return [
        CachedGguf(folder, Path(mark["source"]), size + packed.get(folder.name, 0))
        for folder, (mark, size) in sizes.items()
        if not _is_packed(folder)
    ]


def _is_packed(folder: Path) -> bool:
    return folder.name.endswith(_PACKED)


def _unpack(path: Path, header: GgufHeader, folder: Path) -> None:
    """Dequantise `path` with `transformers` and save model and tokenizer in `folder`."""
    import torch
    import transformers

    place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # From about 5.20 on transformers keeps the blocks packed unless it is asked not to; before, it could not.
    packed = getattr(transformers, "GgufConfig", None)
    how = {"quantization_config": packed(dequantize=True)} if packed else {}
    # Its progress bar cannot be switched off by transformers' own setting, and it ignores whether stderr is a terminal.
    quiet = redirect_stderr(io.StringIO())
    with quiet, readable_errors(f"{path} (GGUF, architecture '{header.architecture}')"):
        require_supported(transformers.AutoConfig.from_pretrained(str(path.parent), **place), str(path))
        tokenizer: Any = byte_level_tokenizer(header)
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **place)
            if len(tokenizer) > len(header.metadata.get("tokenizer.ggml.tokens", [])):
                raise ValueError(f"transformers {transformers.__version__} misreads its tokenizer, try a newer one")
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **place, **how)
    with readable_errors(f"The unpacked copy of {path}", f"written to {folder.parent}"):
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))


@contextmanager
def readable_errors(what: str, verb: str = "loaded") -> Iterator[None]:
    """Whatever a library raises in the block becomes one sentence: `what` cannot be `verb`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what} cannot be {verb}: {reason[:300].rstrip('.')}.") from error


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A private folder beside `folder` that takes its place in one step when the block ends well."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(folder.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"The cache folder {folder.parent} cannot be written ({error.strerror or error}); "
            "set STREAMH2O_CACHE to one that can."
        ) from error
    try:
        yield unfinished
        if folder.exists() and not read_mark(folder):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            unfinished.rename(folder)
        except OSError:
            if not read_mark(folder):  # else another process was first, and its folder is as good
                raise
    except OSError as error:
        raise UserError(f"The cache folder {folder.parent} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_mark(folder: Path, source: Path) -> None:
    sizes = {}
    for file in sorted(folder.iterdir()):
        file.chmod(0o600)
        sizes[file.name] = file.stat().st_size
    text = json.dumps({"source": str(source.resolve()), "version": __version__, "files": sizes}, indent=1)
    descriptor = os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as mark:
        mark.write(text)


def _remove_stale(parent: Path) -> None:
    """Remove what killed runs left behind a day or more ago."""
    for left in parent.glob(".unfinished-*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
