"""The blocks that a GGUF file's weights lie in: which can be kept as they are, and what numbers they stand for.

A block is 32 or 256 neighbouring weights of a row: integers of two to eight bits, a float16 scale, and of some kinds a
float16 minimum. Those of 256 have an integer scale too, and an integer minimum, for each 16 or 32 weights. Source:
ggml-quants.c of ggml; `gguf.quants` of the package gguf is the reference of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_UNEVEN = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)


@dataclass(frozen=True)
class Blocks:
    """One kind of block. number: of the kernel. weights, size: of a block, and its bytes.

    halves: the bytes where its float16 numbers begin. meaning: blocks [..., size] uint8 as weights [..., weights]
    float32.
    """

    name: str
    number: int
    weights: int
    size: int
    halves: tuple[int, ...]
    meaning: Callable[[Tensor], Tensor] = field(repr=False)

    def unpacked(self, blocks: Tensor) -> Tensor:
        """`blocks` [..., n / weights * size] uint8 as [..., n] float32."""
        return self.meaning(blocks.unflatten(-1, (-1, self.size))).flatten(-2)

    def width(self, blocks: Tensor) -> int:
        """How many weights a row of `blocks` is."""
        return blocks.shape[-1] // self.size * self.weights

    def random(self, rows: int, across: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Blocks [rows, across * size] to try things with: any integers, float16 numbers of deviation `scale`."""
        blocks = torch.randint(0, 256, (rows, across, self.size), generator=generator, dtype=torch.uint8)
        most = torch.finfo(torch.float16).max
        for at in self.halves:
            numbers = torch.randn(rows, across, 1, generator=generator) * scale
            blocks[..., at : at + 2] = numbers.clamp(-most, most).half().view(torch.uint8)
        return blocks.flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, [..., 1] float32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _signed(integers: Tensor) -> Tensor:
    return integers.contiguous().view(torch.int8)


def _pieces(packed: Tensor, bits: int, run: int) -> Tensor:
    """Integers of `bits` bits, [..., 8 / bits * n] of bytes [..., n]: of each `run` the lowest bits, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (packed.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def _fifths(packed: Tensor) -> Tensor:
    """16 or 0 for each bit of bytes [..., n], in order."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _times(integers: Tensor, scales: Tensor) -> Tensor:
    """Integers [..., n] times the scale of their group, of scales [..., groups]: [..., groups, n / groups]."""
    return integers.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]


def _q4_0(blocks: Tensor) -> Tensor:
    return (_signed(_pieces(blocks[..., 2:], 4, 16)) - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _pieces(blocks[..., 4:], 4, 16) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    integers = _pieces(blocks[..., 6:], 4, 16) | _fifths(blocks[..., 2:6])
    return (_signed(integers) - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    integers = _pieces(blocks[..., 8:], 4, 16) | _fifths(blocks[..., 4:8])
    return integers * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _signed(blocks[..., 2:]) * _half(blocks, 0)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _UNEVEN[_pieces(blocks[..., 2:], 4, 16).int()] * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
    scaled = _times(_pieces(blocks[..., 16:80], 2, 32), scales * _half(blocks, 80))
    return (scaled - (minima * _half(blocks, 82))[..., None]).flatten(-2)


def _q3_k(blocks: Tensor) -> Tensor:
    integers = _pieces(blocks[..., 32:96], 2, 32) | _pieces(blocks[..., :32], 1, 32) << 2
    scales = _pieces(blocks[..., 96:104], 4, 8) | _pieces(blocks[..., 104:108], 2, 4) << 4
    return _times(_signed(integers) - 4, (_signed(scales) - 32) * _half(blocks, 108)).flatten(-2)


def _of_six(blocks: Tensor, integers: Tensor) -> Tensor:
    """Integers [..., 256] of blocks that begin with two float16 numbers, and scales and minima of six bits."""
    first, second, rest = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=-1) * _half(blocks, 0)
    minima = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=-1) * _half(blocks, 2)
    return (_times(integers, scales) - minima[..., None]).flatten(-2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _of_six(blocks, _pieces(blocks[..., 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _of_six(blocks, _pieces(blocks[..., 48:], 4, 32) | _pieces(blocks[..., 16:48], 1, 32) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    integers = _pieces(blocks[..., :128], 4, 64) | _pieces(blocks[..., 128:192], 2, 32) << 4
    return _times(_signed(integers) - 32, _signed(blocks[..., 192:208]) * _half(blocks, 208)).flatten(-2)


KINDS = {
    kind.name: kind
    for kind in (
        Blocks("Q4_0", 0, 32, 18, (0,), _q4_0),
        Blocks("Q4_1", 1, 32, 20, (0, 2), _q4_1),
        Blocks("Q5_0", 2, 32, 22, (0,), _q5_0),
        Blocks("Q5_1", 3, 32, 24, (0, 2), _q5_1),
        Blocks("Q8_0", 4, 32, 34, (0,), _q8_0),
        Blocks("IQ4_NL", 5, 32, 18, (0,), _iq4_nl),
        Blocks("Q2_K", 6, 256, 84, (80, 82), _q2_k),
        Blocks("Q3_K", 7, 256, 110, (108,), _q3_k),
        Blocks("Q4_K", 8, 256, 144, (0, 2), _q4_k),
        Blocks("Q5_K", 9, 256, 176, (0, 2), _q5_k),
        Blocks("Q6_K", 10, 256, 210, (208,), _q6_k),
    )
}
