"""A loaded model with its tokenizer, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamh2o.cache.families import kv_heads
from streamh2o.kernels.select import TORCH, Kernel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Loaded:
    """A model ready to stream: `model` in evaluation mode on `device`, in `dtype`, with its tokenizer.

    trained_positions: the largest cache plus chunk, in tokens. fingerprint: changes when configuration, weights or
    tokenizer change, wherever the files lie and whenever they were written. weights: plain, or packed: the blocks of
    a GGUF file. kernel: what streams of this model compute with.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    device: torch.device
    trained_positions: int
    fingerprint: str
    weights: str = "plain"
    kernel: Kernel = TORCH

    def info(self) -> dict[str, Any]:
        """What `--json` says about the model; plain numbers and strings."""
        from streamh2o.kernels.gguf_linear import gguf_parameters, weight_bytes

        config: Any = self.model.config.get_text_config()
        heads = config.num_attention_heads
        return {
            "name": self.name,
            "architecture": self.model.config.model_type,
            "parameters": self.model.num_parameters() + gguf_parameters(self.model),
            "layers": config.num_hidden_layers,
            "heads": heads,
            "kv_heads": kv_heads(config),
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "vocabulary": config.vocab_size,
            "trained_positions": self.trained_positions,
            "fingerprint": self.fingerprint,
            "weights": self.weights,
            "weight_bytes": weight_bytes(self.model),
        }
