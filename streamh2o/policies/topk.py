"""Top-K: what the newest queries look at, whatever older ones thought."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from streamh2o.errors import UsageError
from streamh2o.policies.base import Middle, Policy
from streamh2o.policies.mixed import hitters_first


@dataclass(frozen=True)
class TopK(Policy):
    """Sinks and the slots with the most attention of the `newest` queries before the eviction; nothing is accumulated.

    Source: the "Top-K" baseline of arXiv 2306.14048, Table 8, which chooses anew at every query; a chunk evicts once,
    so that its last queries speak for the next chunk's.
    newest: how many queries count. share: part of the middle slots that goes to heavy hitters.
    """

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "sinks and the top by the newest queries' attention"

    newest: int = 16
    share: float = 0.0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return 0, cache - sinks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.newest < 1:
            raise UsageError(f"The newest of {self.name} are {self.newest} queries; at least 1 is needed.")
        if not 0 <= self.share <= 1:
            raise UsageError(f"The share of {self.name} is {self.share}; it must lie between 0 and 1.")

    def newest_weights(self, chunk: int, device: torch.device) -> Tensor:
        return torch.arange(chunk, 0, -1, device=device) <= self.newest

    def priorities(self, layers: Sequence[Middle], seen: int) -> Sequence[Tensor]:
        count = int(self.share * self.hitters)
        return [hitters_first(m.scores, count, m.newest) for m in layers if m.newest is not None]


@dataclass(frozen=True)
class TopKH2(TopK):
    """The same with half of the middle slots for heavy hitters: "TopK w. H2" of arXiv 2306.14048, Table 8."""

    name: ClassVar[str] = "topk+h2"
    summary: ClassVar[str] = "sinks, hitters and the top by the newest queries' attention"

    share: float = 0.5
