"""Sparse Transformer, strided: a recent window and every l-th token before it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy
from streamh2o.policies.mixed import hitters_first


@dataclass(frozen=True)
class SparseStrided(Policy):
    """Sinks, recent tokens and of the middle every `stride`-th token of the stream, the newest of those first.

    Where fewer such tokens have been seen than there are slots, the newest others fill in. The paper's query i sees the
    tokens j with (i - j) mod l = 0; a cache that evicts can serve one of these residues, here j mod l = 0. The paper
    takes l as long as the recent window; 16 here spans a middle of 16 times its slots.

    Source: arXiv 1904.10509, section 4.3, "strided attention", as a baseline in arXiv 2306.14048, Table 2.
    stride: l, in tokens. share: part of the middle slots that goes to heavy hitters.
    """

    name: ClassVar[str] = "sparse-strided"
    summary: ClassVar[str] = "sinks, recent and every 16th token"
    scored: ClassVar[bool] = False

    stride: int = 16
    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride < 1:
            raise UsageError(f"The stride of {self.name} is {self.stride}; it must be at least 1.")
        if not 0 <= self.share <= 1:
            raise UsageError(f"The share of {self.name} is {self.share}; it must lie between 0 and 1.")

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        order = source_index + seen * (source_index % self.stride == 0)
        return hitters_first(scores, int(self.share * self.hitters), order)


@dataclass(frozen=True)
class SparseStridedH2(SparseStrided):
    """The same with half of the middle slots for heavy hitters: "strided w. H2" of arXiv 2306.14048, Table 2."""

    name: ClassVar[str] = "sparse-strided+h2"
    summary: ClassVar[str] = "sinks, recent, every 16th token and hitters"
    scored: ClassVar[bool] = True

    share: float = 0.5
