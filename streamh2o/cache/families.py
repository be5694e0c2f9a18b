"""Which architectures the cache can drive: a table, one line a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn

from streamh2o.errors import UserError
from streamh2o.versions import leading_numbers

# The kind of rotation of each layer: a name of `config.layer_types` where kinds have tables of their own, "" where all
# layers share one, `ALIBI` where slopes stand for it, None where a layer has none.
Kinds = Sequence[str | None]
ALIBI = "alibi"

_MOST_SLOPED = 2**16  # positions of `AlibiTable`
_UNSTATED = 2048  # positions where the configuration has none: what BLOOM and its tuned versions were trained on


def one_table(config: Any) -> Kinds:
    """Every layer rotates by the same angles."""
    return [""] * config.num_hidden_layers


def no_table(config: Any) -> Kinds:
    """No layer rotates: positions are learned, and added to the embedding of the token."""
    return [None] * config.num_hidden_layers


def some_without(config: Any) -> Kinds:
    """SmolLM3: every fourth layer, or those the configuration names, does not rotate (NoPE)."""
    return ["" if rotates else None for rotates in config.no_rope_layers]


def only_sliding(config: Any) -> Kinds:
    """Cohere 2: the layers that look back without a limit do not rotate."""
    return ["" if kind == "sliding_attention" else None for kind in config.layer_types]


def table_each(config: Any) -> Kinds:
    """Gemma 3, OLMo 3: layers with a window and those without have angles of their own."""
    return list(config.layer_types)


def slopes(config: Any) -> Kinds:
    """No layer rotates: a bias grows with the distance (ALiBi)."""
    return [ALIBI] * config.num_hidden_layers


def slopes_or_table(config: Any) -> Kinds:
    """Falcon: the configuration says which."""
    return slopes(config) if config.alibi else one_table(config)


@dataclass(frozen=True)
class Family:
    """One `config.model_type` that is supported.

    title: the name people know it by. kinds: the rotation of each layer. learned_positions: each position of the text
    has an embedding of its own, so that no text can be longer than there are. own_attention: its code in transformers
    lets no attention be chosen; see own_attention.py. since: the first release of transformers whose code of this
    family can be run, where that is not the first one supported.
    """

    title: str
    kinds: Callable[[Any], Kinds] = one_table
    learned_positions: bool = False
    own_attention: bool = False
    since: str = ""


SUPPORTED: dict[str, Family] = {
    "bloom": Family("BLOOM, BLOOMZ", slopes, own_attention=True),
    "cohere": Family("Cohere Command R"),
    "cohere2": Family("Cohere Command R7B, Command A", only_sliding),
    "falcon": Family("Falcon", slopes_or_table, own_attention=True),
    "gemma": Family("Gemma"),
    "gemma2": Family("Gemma 2"),
    "gemma3": Family("Gemma 3, its text side", table_each),
    "gemma3_text": Family("Gemma 3", table_each),
    "gpt2": Family("GPT-2", no_table, learned_positions=True),
    "gpt_neox": Family("GPT-NeoX, Pythia"),
    "gptj": Family("GPT-J", since="5.24"),
    "granite": Family("Granite"),
    "llama": Family("Llama, SmolLM, SmolLM2"),
    "mistral": Family("Mistral"),
    "mpt": Family("MPT", slopes, own_attention=True),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3", table_each),
    "opt": Family("OPT", no_table, learned_positions=True),
    "phi": Family("Phi-1, Phi-2"),
    "phi3": Family("Phi-3, Phi-4"),
    "qwen2": Family("Qwen2, Qwen2.5"),
    "qwen3": Family("Qwen3"),
    "smollm3": Family("SmolLM3", some_without),
    "stablelm": Family("StableLM"),
}


def require_known(kind: str, name: str) -> None:
    """Raise UserError, naming the architecture and those that are supported, where `kind` is not one of them."""
    if kind not in SUPPORTED:
        _refuse(kind, name, "its architecture is not among those supported")


def require_supported(config: Any, name: str) -> None:
    """Raise UserError where the model `name` with this configuration cannot be run."""
    require_known(config.model_type, name)
    since, installed = SUPPORTED[config.model_type].since, version("transformers")
    if since and leading_numbers(installed) < leading_numbers(since):
        _refuse(config.model_type, name, f"it needs transformers {since} or later, and {installed} is installed")
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) or not getattr(config, "scale_attn_weights", True):
        _refuse(config.model_type, name, "its layers scale attention each in its own way")
    if getattr(config.get_text_config(), "use_bidirectional_attention", False):
        _refuse(config.model_type, name, "its tokens look ahead (use_bidirectional_attention)")


def _refuse(kind: str, name: str, reason: str) -> NoReturn:
    known = ", ".join(f"{key} ({family.title})" for key, family in sorted(SUPPORTED.items()))
    raise UserError(f"{name} is a '{kind}' model, which cannot be run: {reason}; supported are {known}.")


def rotation_kinds(config: Any) -> Kinds:
    """The kind of rotation of each layer; see `Kinds`."""
    text = config.get_text_config()
    return SUPPORTED[text.model_type].kinds(text)


def learned_positions(config: Any) -> bool:
    """Whether each position of the text has an embedding of its own."""
    return SUPPORTED[config.get_text_config().model_type].learned_positions


def own_attention(config: Any) -> bool:
    """Whether the model's attention cannot be chosen, and its modules get another forward instead."""
    return SUPPORTED[config.get_text_config().model_type].own_attention


def kv_heads(config: Any) -> int:
    """How many heads keys and values have."""
    text = config.get_text_config()
    if text.model_type == "falcon" and not text.new_decoder_architecture:
        return 1 if text.multi_query else int(text.num_attention_heads)
    number = getattr(text, "num_kv_heads" if text.model_type == "falcon" else "num_key_value_heads", None)
    return int(number or text.num_attention_heads)


def trained_positions(config: Any) -> int:
    """How many positions the model was trained on, in tokens. Cache and chunk together must fit into them."""
    text = config.get_text_config()
    names = "max_position_embeddings", "max_seq_len", "seq_length"
    trained = next((int(number) for name in names if (number := getattr(text, name, None))), _UNSTATED)
    return min(trained, _MOST_SLOPED) if ALIBI in rotation_kinds(config) else trained


def positions_for(config: Any, needed: int) -> int:
    """How many positions a stream gets whose cache and chunk take `needed`.

    That is all that the model was trained on, but for longrope (Phi-3): it has one set of angles for texts up to its
    first length and another for longer ones, and a stream takes the first where it can.
    """
    trained = trained_positions(config)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return int(first) if first is not None and needed <= first else trained
