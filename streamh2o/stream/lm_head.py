"""Hidden states to losses, in blocks, so that memory does not grow with chunk x vocabulary; to logits of a few rows."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from streamh2o.kernels import compiled
from streamh2o.kernels.gguf_linear import GgufLinear
from streamh2o.kernels.select import TORCH, Kernel
from streamh2o.kernels.weight_copies import WeightCopy, spare

BLOCK = 128  # rows of logits at a time
FEW = 4  # rows for which a weight is read as it lies


class LmHead:
    """What turns hidden states [..., hidden] into logits [..., vocabulary], as the model's own forward does.

    Beside the output embedding a family may divide (Granite), multiply (Cohere) or soft-cap (Gemma 2) them.
    kernel: what computes the losses.
    """

    def __init__(self, model: PreTrainedModel, kernel: Kernel = TORCH) -> None:
        self._kernel = kernel
        self._embedding: Any = model.get_output_embeddings()
        if isinstance(self._embedding, nn.Module) and self._embedding in _heads:
            _heads[self._embedding].look_again()
        config = model.config.get_text_config()
        factor = getattr(config, "logit_scale", None) or 1.0
        if config.model_type == "mpt":  # has the number, and makes nothing of it in transformers
            factor = 1.0
        self._factor = factor / (getattr(config, "logits_scaling", None) or 1.0)
        self._cap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        result: Tensor = self._embedding(hidden)
        if self._factor != 1.0:
            result = result * self._factor
        if self._cap:
            result = torch.tanh(result / self._cap) * self._cap
        return result

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats, float32 [rows], of hidden [rows, hidden_size] for the ids `targets` [rows].

        The log-sum-exp is taken in float32. Plain torch makes `BLOCK` rows of logits at a time.
        """
        if self._is_product() and self._kernel.takes(hidden) and self._embedding.weight.dtype == hidden.dtype:
            return compiled.head_losses(hidden, self._embedding.weight, self._packed(), targets)
        if self._is_packed_product(hidden):
            return self._embedding.losses(hidden, targets)
        result = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(targets), BLOCK):
            rows = slice(start, start + BLOCK)
            block, wanted = self(hidden[rows]), targets[rows]
            if self._kernel.takes(block):
                result[rows] = compiled.losses(block, wanted)
                continue
            block = block.float()
            target = block.gather(1, wanted[:, None].to(block.device))[:, 0]  # where `--device-map` put the head
            peak = block.amax(dim=-1, keepdim=True)
            # In place: a second array of this size would cost more in page faults than the exponentials do.
            result[rows] = block.sub_(peak).exp_().sum(dim=-1).log_().add_(peak[:, 0]).sub_(target)
        return result

    def _is_product(self) -> bool:
        """Whether logits are products with the embedding and nothing else."""
        layer = self._embedding
        plain = type(layer) is nn.Linear and layer.bias is None and layer.in_features % 2 == 0
        plain = plain and self._kernel.takes(layer.weight) and layer.weight.is_contiguous()
        given = vars(layer).get("forward")  # that of `FewRows` where another thread is in a decode step
        own = given is None or isinstance(getattr(given, "__self__", None), FewRows)
        return plain and own and self._factor == 1.0 and not self._cap

    def _is_packed_product(self, hidden: Tensor) -> bool:
        """The same of an embedding in the blocks of a GGUF file."""
        layer = self._embedding
        return isinstance(layer, GgufLinear) and layer.compiled(hidden) and self._factor == 1.0 and not self._cap

    def _packed(self) -> Tensor | None:
        """The embedding as the kernel wants it, where memory allows."""
        layer = self._embedding
        if layer not in _heads:
            if not spare(layer.weight.nbytes):
                return None
            _heads[layer] = WeightCopy(layer, compiled.pack_head)
        return _heads[layer].weight


_heads: WeakKeyDictionary[nn.Module, WeightCopy] = WeakKeyDictionary()


class FewRows:
    """From `on` to `off` a model's output embedding is read as it lies for the few rows of a decode step.

    In bfloat16 plain torch takes two to three times as long for them. Other layers and more rows stay as they are.
    """

    def __init__(self, model: PreTrainedModel, kernel: Kernel) -> None:
        self._layer: Any = model.get_output_embeddings()
        self._kernel = kernel
        self._forward: Any = None  # what stands in

    def on(self) -> None:
        layer = self._layer
        if type(layer) is nn.Linear and "forward" not in vars(layer) and _read_well(layer, self._kernel):
            self._forward = self._few_rows
            layer.__dict__["forward"] = self._forward

    def off(self) -> None:
        if self._forward is not None and vars(self._layer).get("forward") is self._forward:
            del self._layer.__dict__["forward"]

    def _few_rows(self, x: Tensor) -> Tensor:
        layer = self._layer
        few = 0 < x.numel() <= FEW * x.shape[-1] and x.dtype == layer.weight.dtype
        if few and not (torch.is_grad_enabled() and any(part.requires_grad for part in (x, *layer.parameters()))):
            return compiled.few_linear(x, layer.weight, layer.bias)
        return functional.linear(x, layer.weight, layer.bias)


def _read_well(layer: nn.Linear, kernel: Kernel) -> bool:
    """Whether the kernel can read this weight as it lies, and is right."""
    parts = list(layer.parameters())
    fit = all(part.dtype == torch.bfloat16 and part.is_contiguous() and kernel.takes(part) for part in parts)
    return fit and _right()


@cache
def _right() -> bool:
    """Whether the kernel gives with a small weight what plain torch gives."""
    x, weight = torch.randn(3 + 70, 90, generator=torch.Generator().manual_seed(0)).bfloat16().split([3, 70])
    expected, found = x.float() @ weight.float().T, compiled.few_linear(x, weight, None).float()
    return bool((expected - found).abs().max() <= 2**-7 * expected.abs().max())
