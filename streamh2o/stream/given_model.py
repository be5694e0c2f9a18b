"""The models that streams and caches take: of `transformers`, alone or with the tokenizer beside it."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedModel

from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import Kernel, select


class ModelAndTokenizer(Protocol):
    """What `load_model` returns."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> Any: ...


def model_and_tokenizer(given: PreTrainedModel | ModelAndTokenizer) -> tuple[PreTrainedModel, Any]:
    """The model, and its tokenizer or None. Raises UsageError for anything else."""
    if isinstance(given, PreTrainedModel):
        return given, None
    model = getattr(given, "model", None)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"A model of transformers is needed, or what load_model returns, and a {type(given).__name__} was given."
        )
    return model, given.tokenizer


def require_weights(model: PreTrainedModel) -> None:
    """Raise UserError for a model that has no numbers yet; what `--device-map` put on disk has some."""
    if not hasattr(model, "hf_device_map") and any(part.is_meta for part in model.parameters()):
        raise UserError(f"A part of {type(model).__name__} is on the device meta and has no numbers; load its weights.")


def kernel_for(given: PreTrainedModel | ModelAndTokenizer, kernel: str | Kernel) -> Kernel:
    """What computes for `given`: with `auto` what `load_model` chose, where that is what gave it."""
    if isinstance(kernel, Kernel):
        return kernel
    chosen = getattr(given, "kernel", None)
    if kernel == "auto" and isinstance(chosen, Kernel):
        return chosen
    return select(kernel, model_and_tokenizer(given)[0].device)
