"""Sparse Transformer, strided: a recent window and every l-th token before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.mixed import Pattern

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SparseStrided(Pattern):
    """Keeps sinks, recent tokens and of the middle every `stride`-th token of the stream, the newest of those first.

    Where fewer such tokens have been seen than there are slots, the newest others fill in. The paper's query i sees the
    tokens j with (i - j) mod l = 0; a cache that evicts can serve one of these residues, here j mod l = 0. The paper
    makes l as long as the recent window; 16 here spans a middle of 16 times its slots.

    Knobs: stride, the paper's l, in tokens. share: see Mixed.

    Source: arXiv 1904.10509, section 4.3, "strided attention", as a baseline in arXiv 2306.14048, Table 2.
    """

    rule: ClassVar[str] = "sparse-strided"

    stride: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 1:
            raise UsageError(f"The stride of {self.name} is {self.stride}; it must be at least 1.")

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        return self.hitters_first(scores, source_index + seen * (source_index % self.stride == 0))
