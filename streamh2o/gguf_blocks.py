"""The blocks that a GGUF file's weights lie in: which can be kept as they are, and what numbers they stand for.

A block is 32 neighbouring weights of a row: a float16 scale d, for Q4_1 a float16 minimum m, and 32 integers q, of
which those of four bits lie two in a byte, the first 16 weights in the lower halves. Source: ggml-quants.c of ggml;
`gguf.quants` of the package gguf is the reference of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHTS = 32  # of a block


@dataclass(frozen=True)
class Blocks:
    """One kind of block. number: of the kernel. size: bytes of a block. integers: the byte where they begin."""

    name: str
    number: int
    size: int
    integers: int

    def unpacked(self, blocks: Tensor) -> Tensor:
        """`blocks` [..., n / 32 * size] uint8 as [..., n] float32: q d + m, or (q - 8) d, or, of eight bits, q d."""
        parts = blocks.unflatten(-1, (-1, self.size))  # [..., blocks, size]
        scale = _halves(parts[..., :2])
        integers = parts[..., self.integers :]
        if self.name == "Q8_0":
            return (integers.contiguous().view(torch.int8).float() * scale).flatten(-2)
        both = torch.cat([integers & 15, integers >> 4], dim=-1).float()
        values = both.mul_(scale).add_(_halves(parts[..., 2:4])) if self.name == "Q4_1" else both.sub_(8).mul_(scale)
        return values.flatten(-2)

    def width(self, blocks: Tensor) -> int:
        """How many weights a row of `blocks` is."""
        return blocks.shape[-1] // self.size * WEIGHTS


def _halves(pair: Tensor) -> Tensor:
    """The number whose two bytes are the last dimension [..., 2] of `pair`, [..., 1] float32."""
    return pair.contiguous().view(torch.float16).float()


KINDS = {kind.name: kind for kind in (Blocks("Q4_0", 0, 18, 2), Blocks("Q4_1", 1, 20, 4), Blocks("Q8_0", 2, 34, 2))}
