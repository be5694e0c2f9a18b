"""Sparse Transformer, fixed: the block at hand and the last few tokens of every block before it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy
from streamh2o.policies.mixed import hitters_first


@dataclass(frozen=True)
class SparseFixed(Policy):
    """Sinks, recent tokens and of the middle the last `summary_tokens` of every block, the newest of those first.

    Where fewer such tokens have been seen than there are slots, the newest others fill in. The paper's query also sees
    its own block; here the recent window stands for it, and contains it where --recent is a block or more.

    Source: arXiv 1904.10509, section 4.3, "fixed attention" (l = 128, c = 8), as a baseline in arXiv 2306.14048,
    Table 2. block: l, in tokens. summary_tokens: c. share: part of the middle slots that goes to heavy hitters.
    """

    name: ClassVar[str] = "sparse-fixed"
    summary: ClassVar[str] = "sinks, recent and the last 8 of every 128 tokens"
    scored: ClassVar[bool] = False

    block: int = 128
    summary_tokens: int = 8
    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.summary_tokens <= self.block:
            raise UsageError(
                f"The summary_tokens of {self.name} are {self.summary_tokens}; they must lie between 1 and the block "
                f"of {self.block} tokens."
            )
        if not 0 <= self.share <= 1:
            raise UsageError(f"The share of {self.name} is {self.share}; it must lie between 0 and 1.")

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        order = source_index + seen * (source_index % self.block >= self.block - self.summary_tokens)
        return hitters_first(scores, int(self.share * self.hitters), order)


@dataclass(frozen=True)
class SparseFixedH2(SparseFixed):
    """The same with half of the middle slots for heavy hitters: "fixed w. H2" of arXiv 2306.14048, Table 2."""

    name: ClassVar[str] = "sparse-fixed+h2"
    summary: ClassVar[str] = "sinks, recent, the last 8 of every 128 tokens and hitters"
    scored: ClassVar[bool] = True

    share: float = 0.5
