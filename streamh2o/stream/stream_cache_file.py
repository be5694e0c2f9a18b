"""A StreamCache in a file of safetensors: its tensors, and its settings and counts as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o.cache.decoding_cache import DecodingCache
from streamh2o.errors import UserError

SCHEMA = 1
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
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        save_file(tensors, str(unfinished), {_NOTES: json.dumps(settings | notes)})
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise UserError(f"{path} can't be written ({error}).") from None


def read_cache(path: Path, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors on the model's device, and the settings with `groups`, the counts of each.

    Raises UserError where the file can't be read, or is of another model.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(model.device)) as file:
            notes = json.loads((file.metadata() or {})[_NOTES])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = "it is no file of a StreamCache" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} can't be read ({reason}).") from None
    if notes.get("schema") != SCHEMA:
        raise UserError(f"{path} was written by another version of streamh2o, and can't be read.")
    if notes["model"] != _model_digest(model):
        raise UserError(f"{path} was saved with another model, or in another number format.")
    return tensors, notes


def _model_digest(model: PreTrainedModel) -> str:
    """Changes when names, shapes, number formats or weights change; of each weight the first numbers are looked at."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sample = tensor.detach().flatten()[:_SAMPLE].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
