"""Every supported family as tiny random models: the cases that tests/test_families.py runs and docs/models.md lists.

A family has heads of its own (MHA) and grouped ones (GQA) where its configuration allows both. Weights are large enough
for attention to be far from uniform, and every norm and bias is random too, so that a part left out shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 10  # tokens; the texts of the tests are longer
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Case:
    """One tiny model. family: its `model_type`. variant: what is particular about it. kv_heads: of its 8 heads."""

    family: str
    variant: str
    kv_heads: int
    make: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}" if self.variant else self.family

    def config(self) -> Any:
        return self.make()

    def model(self) -> PreTrainedModel:
        return random_model(self.make())


def random_model(config: Any) -> PreTrainedModel:
    """A model of this configuration, every weight random, norms and biases too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.5 if "embed" in name or "head" in name or "wte" in name else 0.25)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def _grouped(family: str, config: str, variants: dict[str, dict[str, Any]] | None = None, **always: Any) -> list[Case]:
    """A family with MHA and GQA, and each of `variants` with GQA."""
    kind = getattr(transformers, config)

    def case(variant: str, kv_heads: int, **extra: Any) -> Case:
        return Case(
            family, variant, kv_heads, lambda: kind(**SIZES | {"num_key_value_heads": kv_heads} | always | extra)
        )

    cases = [case("", 2), case("mha", 8)]
    return cases + [case(variant, 2, **extra) for variant, extra in (variants or {}).items()]


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES = {
    "linear": _rope("linear", factor=2.0),
    "dynamic": _rope("dynamic", factor=4.0),
    "yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "llama3": _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
}
LONGROPE = _rope("longrope", original_max_position_embeddings=128, **_LONG)  # of texts up to 128 tokens, and longer
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": MIXED}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _gemma3() -> Any:
    text = SIZES | GEMMA | {"num_key_value_heads": 2, "rope_parameters": GEMMA3_ROPE}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), VOCABULARY - 1),
    )


BLOOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}
MPT = {"vocab_size": VOCABULARY, "d_model": 64, "n_heads": 8, "n_layers": 2, "max_seq_len": 512}
FALCON = SIZES | {"bias": True}


def _falcon(variant: str, kv_heads: int, **extra: Any) -> Case:
    return Case("falcon", variant, kv_heads, lambda: transformers.FalconConfig(**FALCON | extra))


CASES: list[Case] = [
    Case("bloom", "", 8, lambda: transformers.BloomConfig(**BLOOM)),
    Case(
        "bloom",
        "post-norm",
        8,
        lambda: transformers.BloomConfig(**BLOOM, apply_residual_connection_post_layernorm=True),
    ),
    Case("bloom", "12-heads", 12, lambda: transformers.BloomConfig(**BLOOM | {"hidden_size": 96, "n_head": 12})),
    _falcon("", 2, new_decoder_architecture=True, num_kv_heads=2),
    _falcon("mha", 8, multi_query=False),
    _falcon("multi-query", 1),
    _falcon("yarn", 2, new_decoder_architecture=True, num_kv_heads=2, **ROPES["yarn"]),
    _falcon("alibi", 8, alibi=True, multi_query=False, parallel_attn=False),
    _falcon("alibi-grouped", 2, alibi=True, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    Case("mpt", "", 8, lambda: transformers.MptConfig(**MPT)),
    Case("mpt", "12-heads", 12, lambda: transformers.MptConfig(**MPT | {"d_model": 96, "n_heads": 12})),
    Case(
        "mpt",
        "clipped",
        8,
        lambda: transformers.MptConfig(
            **MPT, logit_scale=0.5, attn_config={"clip_qkv": 0.8, "softmax_scale": 0.5, "alibi_bias_max": 4}
        ),
    ),
    *_grouped("llama", "LlamaConfig", ROPES | {"longrope": LONGROPE}),
    *_grouped("mistral", "MistralConfig", {"window": {"sliding_window": WINDOW}}, sliding_window=None),
    *_grouped(
        "qwen2",
        "Qwen2Config",
        {"window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}},
    ),
    *_grouped("qwen3", "Qwen3Config", head_dim=8),
    *_grouped("smollm3", "SmolLM3Config", no_rope_layers=[1, 0]),
    *_grouped("olmo2", "Olmo2Config"),
    *_grouped("olmo3", "Olmo3Config", sliding_window=WINDOW, layer_types=MIXED),
    *_grouped(
        "granite",
        "GraniteConfig",
        logits_scaling=4.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        embedding_multiplier=3.0,
    ),
    *_grouped(
        "phi3",
        "Phi3Config",
        {
            "window": {"sliding_window": WINDOW},
            "longrope": LONGROPE | {"original_max_position_embeddings": 128},
            "partial": _rope("default", partial_rotary_factor=0.5),
        },
    ),
    *_grouped("phi", "PhiConfig", **_rope("default", partial_rotary_factor=0.5)),
    *_grouped(
        "stablelm",
        "StableLmConfig",
        {"normed": {"qk_layernorm": True, "use_parallel_residual": True}},
        **_rope("default", partial_rotary_factor=0.25),
    ),
    *_grouped("cohere", "CohereConfig", {"normed": {"use_qk_norm": True}}, logit_scale=0.5),
    *_grouped("cohere2", "Cohere2Config", sliding_window=WINDOW, layer_types=MIXED, head_dim=8, logit_scale=0.5),
    *_grouped("gemma", "GemmaConfig", head_dim=8),
    *_grouped("gemma2", "Gemma2Config", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **GEMMA),
    *_grouped("gemma3_text", "Gemma3TextConfig", rope_parameters=GEMMA3_ROPE, **GEMMA),
    Case("gemma3", "", 2, _gemma3),
    Case(
        "gpt_neox",
        "",
        8,
        lambda: transformers.GPTNeoXConfig(**SIZES, **_rope("default", partial_rotary_factor=0.5)),
    ),
    Case("gptj", "", 8, lambda: transformers.GPTJConfig(**_GPT, rotary_dim=4)),
    Case("gpt2", "", 8, lambda: transformers.GPT2Config(**_GPT)),
    Case("opt", "", 8, lambda: transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=64)),
    Case(
        "opt",
        "350m",
        8,
        lambda: transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=False),
    ),
]


def of_family(family: str) -> Iterator[Case]:
    return (case for case in CASES if case.family == family)
