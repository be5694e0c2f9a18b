"""Models that a StreamCache is not for, and what it can't do for the others: each refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.families import learned_positions, require_supported
from streamh2o.errors import UsageError, UserError


def require_decoding(model: PreTrainedModel) -> None:
    """Raise UserError or UsageError for a model that a StreamCache is not for."""
    config, decoder = model.config, model.get_decoder()
    require_supported(config, getattr(config, "name_or_path", "") or type(model).__name__)
    if learned_positions(config):
        raise UserError(
            f"A '{config.model_type}' model has learned its positions, which can't be given anew when slots move; "
            "a StreamCache needs a model with rotary positions."
        )
    if decoder is not model.base_model:
        raise UserError(
            f"A {type(model).__name__} has its text model inside one for images, where padding can't be seen; load "
            "its text side alone (AutoModelForCausalLM with the text configuration) for a StreamCache."
        )
    if any(getattr(each, "_compiled_call_impl", None) is not None for each in (model, decoder)):
        raise UsageError("The model is compiled, and a StreamCache can't be; use the model as it was before.")


def refuse_call(decoder: nn.Module, argument: str, kwargs: dict[str, Any]) -> None:
    """Raise UsageError where a call of `decoder` asks for what a StreamCache can't do. argument: its input's name."""
    if kwargs.get(argument) is None:
        raise UsageError("The model was called without input_ids.")
    if kwargs.get("use_cache") is False:
        raise UsageError(
            "use_cache=False, which some models have in their configuration, and a StreamCache contradict each other; "
            "say use_cache=True."
        )
    if kwargs.get("output_attentions"):
        raise UsageError("A StreamCache gives no attention weights; leave output_attentions out.")
    if torch.compiler.is_compiling():
        raise UsageError("A StreamCache can't be compiled; use the model as it was before torch.compile.")
    if torch.is_grad_enabled() and next(decoder.parameters()).requires_grad:
        raise UsageError("A StreamCache is for inference; call the model inside torch.no_grad().")


def refuse_another_text(
    tokens: int, longest: int, inputs: Tensor, mask: Tensor | None, positions: Tensor | None
) -> None:
    """Raise UserError where `inputs` [batch, columns, ...] don't go on after the `tokens` columns that were read.

    longest: of them, those of the row with the least padding.

    `generate` cuts what was read off the text it is given, whatever that is; of a shorter one it leaves some part. Mask
    and positions [batch, columns] show that. Another text that is longer can't be told from one that goes on.
    """
    columns = inputs.shape[1]
    fits = columns > 0
    if fits and tokens and mask is not None and mask.dim() == 2:
        fits = mask.shape[1] == tokens + columns
    if fits and tokens and positions is not None and positions.dim() == 2:
        fits = int(positions.max()) == longest + columns - 1
    if not fits:
        raise UserError(
            f"What was given does not go on after the {tokens} tokens that this StreamCache has read; give all of that "
            "text and what follows, or reset() the cache for another text."
        )
