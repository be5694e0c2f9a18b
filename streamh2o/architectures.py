"""Which architectures the cache can drive: a table, one line a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from streamh2o.errors import UserError


@dataclass(frozen=True)
class Family:
    """One `config.model_type` that is supported.

    title: the name people know it by. refuse: gives the reason why one configuration of the family cannot be run,
    or None where it can.
    """

    title: str
    refuse: Callable[[Any], str | None]


def sliding_window(config: Any) -> str | None:
    """Why a configuration whose layers look back less far than the trained positions is refused, else None."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return f"its layers look back {window} tokens only (sliding-window attention)"


SUPPORTED: dict[str, Family] = {
    "llama": Family("Llama, SmolLM, SmolLM2", sliding_window),
    "mistral": Family("Mistral without a sliding window", sliding_window),
    "qwen2": Family("Qwen2, Qwen2.5", sliding_window),
    "qwen3": Family("Qwen3", sliding_window),
    "gpt_neox": Family("GPT-NeoX, Pythia", sliding_window),
}


def require_known(kind: str, name: str) -> None:
    """Raise UserError, naming the architecture and those that are supported, where `kind` is not one of them."""
    if kind not in SUPPORTED:
        _refuse(kind, name, "its architecture is not among those supported")


def require_supported(config: Any, name: str) -> None:
    """Raise UserError where the model `name` with this configuration cannot be run."""
    require_known(config.model_type, name)
    reason = SUPPORTED[config.model_type].refuse(config)
    if reason is not None:
        _refuse(config.model_type, name, reason)


def _refuse(kind: str, name: str, reason: str) -> NoReturn:
    known = ", ".join(f"{key} ({family.title})" for key, family in sorted(SUPPORTED.items()))
    raise UserError(f"{name} is a '{kind}' model, which cannot be run: {reason}; supported are {known}.")


def trained_positions(config: Any) -> int:
    """How many positions the model was trained on: the largest cache plus chunk it can be given, in tokens."""
    return int(config.get_text_config().max_position_embeddings)
