"""Sparse Transformer, fixed: the block at hand and the last few tokens of every block before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.mixed import Pattern

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SparseFixed(Pattern):
    """Keeps sinks, recent tokens and of the middle the last tokens of every block, the newest of those first.

    Where fewer such tokens have been seen than there are slots, the newest others fill in. The paper's query also sees
    its own block; here the recent window stands for it, and contains it where --recent is a block or more.

    Knobs: block, the paper's l, in tokens. summary_tokens, its c: how many at the end of each block. share: see Mixed.

    Source: arXiv 1904.10509, section 4.3, "fixed attention" (l = 128, c = 8), as a baseline in arXiv 2306.14048,
    Table 2.
    """

    rule: ClassVar[str] = "sparse-fixed"

    block: int = 128
    summary_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.summary_tokens <= self.block:
            raise UsageError(
                f"The summary_tokens of {self.name} are {self.summary_tokens}; they must lie between 1 and the block "
                f"of {self.block} tokens."
            )

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        order = source_index + seen * (source_index % self.block >= self.block - self.summary_tokens)
        return self.hitters_first(scores, order)
