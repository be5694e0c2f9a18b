"""Small random models for the tests of mechanics. What only a trained model shows is in tests/acceptance."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 97


def llama(heads: int = 8, kv_heads: int = 2, layers: int = 2, positions: int = 512, **extra) -> PreTrainedModel:
    return build(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=heads * 8,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=positions,
            **extra,
        )
    )


def gpt_neox(rotary_share: float = 0.25, **extra) -> PreTrainedModel:
    return build(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            rotary_pct=rotary_share,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary_share},
            **extra,
        )
    )


def qwen(config_class: type = Qwen2Config) -> PreTrainedModel:
    return build(
        config_class(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
        )
    )


FAMILIES = {
    "llama": llama,
    "llama-mha": lambda: llama(4, 4),
    "qwen2": qwen,
    "qwen3": lambda: qwen(Qwen3Config),
    "gpt_neox": gpt_neox,
}


def build(config) -> PreTrainedModel:
    """A model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25 if "proj" in name or "query" in name else 0.5)
    return model


def tokens(count: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def stream_losses(model, policy, ids: torch.Tensor, chunk: int, **extra) -> torch.Tensor:
    """Losses [batch, count - 1] of `ids` fed in chunks."""
    from streamh2o.stream.chunk_stream import ChunkStream

    with ChunkStream(model, policy, chunk=chunk, batch=ids.shape[0], **extra) as stream:
        parts = [stream.feed(ids[:, start : start + chunk]).losses for start in range(0, ids.shape[1], chunk)]
    return torch.cat(parts, dim=1)


def dense_losses(model, ids: torch.Tensor) -> torch.Tensor:
    """What plain `transformers` says of the same tokens."""
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].double()  # over a large vocabulary a float32 sum in turn is off by 1e-4
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").float()
