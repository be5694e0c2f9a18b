"""Linear layers and embeddings whose weights stay the blocks of a GGUF file.

The compiled kernel multiplies with the blocks as they are. Without it each call unpacks the weights of its layer first,
which gives the same numbers slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from streamh2o.kernels import compiled
from streamh2o.kernels.gguf_blocks import KINDS, Blocks
from streamh2o.kernels.select import TORCH, Kernel

WORDS = 8192  # of the vocabulary at a time
_WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of the largest number


class GgufLinear(nn.Module):
    """x [..., in_features] times the weights, transposed, plus bias: what nn.Linear gives of the unpacked weights.

    blocks: [out_features, bytes] uint8 of `kind`. bias: [out_features], or None. dtype: of x and of the result; the
    weights are rounded to it as they are multiplied. kernel: what multiplies.
    """

    blocks: Tensor
    bias: Tensor | None

    def __init__(
        self, blocks: Tensor, kind: Blocks, bias: Tensor | None, dtype: torch.dtype, kernel: Kernel = TORCH
    ) -> None:
        super().__init__()
        self.kind, self.dtype, self.kernel = kind, dtype, kernel
        self.out_features, self.in_features = len(blocks), kind.width(blocks)
        self.register_buffer("blocks", blocks, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.to(dtype).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.compiled(x):
            return compiled.packed_linear(x, self.blocks, self.kind.number, self._float_bias())
        weight = self.kind.unpacked(self.blocks).to(x.dtype)
        return nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

    def _float_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.float()  # `model.to` may have changed it

    def compiled(self, x: Tensor) -> bool:
        """Whether the kernel multiplies x."""
        return self.kernel.takes(x) and _sound(self.kind.name, x.dtype)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats, float32 [rows], of the logits of x [rows, in_features], which `compiled` must take.

        `WORDS` of them are made at a time, for all rows, since that unpacks each weight once.
        """
        sums, target, bias = [], torch.zeros(len(targets)), self._float_bias()
        for start in range(0, self.out_features, WORDS):
            words = slice(start, start + WORDS)
            part = None if bias is None else bias[words]
            logits = compiled.packed_linear(x, self.blocks[words], self.kind.number, part)
            place = targets - start
            nearest = place.clamp(0, logits.shape[1] - 1)
            picked = logits.gather(1, nearest[:, None])[:, 0].float()
            sums.append(compiled.losses(logits, nearest) + picked)
            target = torch.where(place == nearest, picked, target)
        return torch.stack(sums).logsumexp(dim=0) - target

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind.name}, bias={self.bias is not None}"


class GgufEmbedding(nn.Module):
    """The rows of the weights that belong to ids [...], [..., width]; blocks, kind and dtype as of GgufLinear."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: Blocks, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.num_embeddings, self.embedding_dim = len(blocks), kind.width(blocks)
        self.register_buffer("blocks", blocks, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.kind.unpacked(self.blocks[ids]).to(self.dtype)


def gguf_modules(model: nn.Module) -> Iterator[GgufLinear | GgufEmbedding]:
    """Those of `model` in its order."""
    return (module for module in model.modules() if isinstance(module, GgufLinear | GgufEmbedding))


def gguf_parameters(model: nn.Module) -> int:
    """How many weights of `model` are in blocks, those that two modules share counted once, and biases beside them."""
    modules = list(gguf_modules(model))
    counts = {each.blocks.data_ptr(): len(each.blocks) * each.kind.width(each.blocks) for each in modules}
    biases = [each.bias for each in modules if isinstance(each, GgufLinear) and each.bias is not None]
    return sum(counts.values()) + sum(bias.numel() for bias in biases)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights of `model` in memory, shared ones counted once, without the copies that speed makes."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@cache
def _sound(name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel gives with a few blocks what plain torch gives."""
    kind, generator = KINDS[name], torch.Generator().manual_seed(0)
    blocks = kind.random(70, 3, generator)
    x = torch.randn(20, kind.width(blocks), generator=generator).to(dtype)
    expected = x.float() @ kind.unpacked(blocks).to(dtype).float().T
    try:
        found = [compiled.packed_linear(rows, blocks, kind.number, None) for rows in (x[:3], x)]
    except RuntimeError:  # oneDNN has no such product for this processor
        return False
    within = _WITHIN[dtype] * expected.abs().max()
    return all(bool((each.float() - expected[: len(each)]).abs().max() <= within) for each in found)
