"""A StreamCache in a file of safetensors: its tensors, and its settings and counts as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o.cache.decoding_cache import DecodingCache
from streamh2o.errors import UserError
from streamh2o.policies import Policy

SCHEMA = 1
_DIGEST = "sha256"  # in the metadata too: of all that is in the file
_NOTES = "streamh2o"  # the name of the JSON in the file's metadata
_SAMPLE = 64  # numbers of each weight that a model is known by


def write_cache(path: Path, model: PreTrainedModel, groups: Sequence[DecodingCache], settings: dict[str, Any]) -> None:
    """Write `groups` and `settings`. Raises UserError where the file can't be written."""
    tensors = {
        f"group{number}.{name}": tensor.contiguous().cpu()
        for number, group in enumerate(groups)
        for name, tensor in group.state().items()
    }
    notes = {"schema": SCHEMA, "model": _model_digest(model), "groups": [group.counts() for group in groups]}
    text = json.dumps(settings | notes, default=repr)  # a policy of one's own may have knobs of any kind
    beside = None
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file that a StreamCache could be written to; choose another name.")
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        os.close(handle)
        save_file(tensors, beside, {_NOTES: text, _DIGEST: _content_digest(tensors, text)})
        os.chmod(beside, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(beside, path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} can't be written ({error}).") from None
    finally:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_cache(path: Path, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors on the model's device, and the settings with `groups`, the counts of each.

    Raises UserError where the file can't be read, is damaged, or is of another model.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}).") from None
    if _NOTES not in metadata:
        raise UserError(f"{path} can't be read (it is no file of a StreamCache).")
    text = metadata[_NOTES]
    if metadata.get(_DIGEST) != _content_digest(tensors, text):
        raise UserError(f"{path} is damaged, and can't be read.")
    notes = json.loads(text)
    if notes.get("schema") != SCHEMA:
        raise UserError(f"{path} was written by another version of streamh2o, and can't be read.")
    if notes["model"] != _model_digest(model):
        raise UserError(f"{path} was saved with another model, or in another number format.")
    return {name: tensor.to(model.device) for name, tensor in tensors.items()}, notes


def described(policy: Policy) -> dict[str, Any]:
    """A policy among the settings."""
    return {"policy": policy.name, "knobs": asdict(policy)}


def is_saved_policy(policy: Policy, settings: dict[str, Any]) -> bool:
    """Whether `settings`, which were read, are of this policy."""
    mine = json.loads(json.dumps(described(policy), default=repr))
    return all(settings[name] == value for name, value in mine.items())


def _content_digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _model_digest(model: PreTrainedModel) -> str:
    """Changes when names, shapes, number formats or weights change; of each weight the first numbers are looked at."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sample = tensor.detach().flatten()[:_SAMPLE].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
