"""What a caller gives as a model (a name, what `load_model` returns, or a model and its tokenizer) as a `Loaded`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from streamh2o.models.loaded import Loaded

    Model: TypeAlias = str | os.PathLike[str] | Loaded | tuple[PreTrainedModel, PreTrainedTokenizerBase]

_SAMPLES = 64  # numbers of each parameter that a fingerprint reads


def to_loaded(model: Model, *, dtype: str = "auto", device: str = "auto", kernel: str = "auto") -> Loaded:
    """The model that `model` stands for.

    model: a name as on the command line (see `load_model`), what `load_model` returns, or a pair of a causal model of
    `transformers` in evaluation mode and its fast tokenizer. dtype, device: for a name only. kernel: `auto` leaves that
    of a `Loaded` alone. Raises UsageError where a dtype or device is given for a model that is loaded, UserError where
    the model cannot be had or is not supported.
    """
    from streamh2o.kernels.select import select
    from streamh2o.models.load import load_model, tell
    from streamh2o.models.loaded import Loaded

    if isinstance(model, str | os.PathLike):
        return load_model(os.fspath(model), dtype, device, kernel=kernel)
    for option, value in (("dtype", dtype), ("device", device)):
        if value != "auto":
            raise UsageError(f"{option}={value!r} is for a model given by its name; this one is loaded.")
    if isinstance(model, Loaded):
        return model if kernel == "auto" else replace(model, kernel=select(kernel, model.device, tell))
    if isinstance(model, tuple | list) and len(model) == 2:
        loaded = _from_pair(*model)
        return replace(loaded, kernel=select(kernel, loaded.device, tell))
    raise UsageError(
        f"model is a name, what load_model returns, or a pair (model, tokenizer), not {type(model).__name__}."
    )


def _from_pair(model: Any, tokenizer: Any) -> Loaded:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from streamh2o.cache.families import require_supported, trained_positions
    from streamh2o.models.loaded import Loaded

    if not isinstance(model, PreTrainedModel) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        kinds = f"{type(model).__name__} and {type(tokenizer).__name__}"
        raise UsageError(f"A pair is a model of transformers and its tokenizer, in this order, not {kinds}.")
    name = model.name_or_path or type(model).__name__
    if model.training:
        raise UsageError(f"{name} is in training mode, where dropout makes losses random; call model.eval() first.")
    require_supported(model.config, name)
    positions = trained_positions(model.config)
    return Loaded(name, model, tokenizer, model.dtype, model.device, positions, _fingerprint(model, tokenizer))


def _fingerprint(model: PreTrainedModel, tokenizer: Any) -> str:
    """16 hexadecimal digits for evenly spaced numbers of each parameter, and for the tokenizer."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.config.get_text_config().to_json_string()}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.reshape(-1)
            digest.update(repr(flat[:: max(1, flat.numel() // _SAMPLES)].tolist()).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(backend.to_str().encode() if backend is not None else repr(tokenizer).encode())
    return digest.hexdigest()[:16]


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Compute on so many threads inside the block; None leaves torch's threads alone."""
    import torch

    if threads is None:
        yield
        return
    if threads < 1:
        raise UsageError(f"threads is {threads}; it must be at least 1.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
