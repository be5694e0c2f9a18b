"""Policies with a rule of their own for the middle that can leave a share of it to heavy hitters: `NAME+h2`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy

if TYPE_CHECKING:
    from torch import Tensor

H2_SHARE = 0.5  # of a policy called `NAME+h2`


@dataclass(frozen=True)
class Mixed(Policy):
    """Keeps sinks, recent tokens and a middle chosen by the policy's rule, less the share that goes to heavy hitters.

    Knobs: share, the part of the middle slots that goes to heavy hitters (0: none). With one the name ends in `+h2`.

    Source: the rows "w. H2" of arXiv 2306.14048, Tables 2 and 8.
    """

    rule: ClassVar[str]  # the name without hitters

    share: float = 0.0

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.rule}+h2" if self.share else self.rule

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise UsageError(f"The share of {self.rule} is {self.share}; it must lie between 0 and 1.")

    def hitters_first(self, scores: Tensor, order: Tensor) -> Tensor:
        """`order` with the share of highest scores lifted above everything else.

        scores and order: [batch, kv_heads, middle]. A slot that both would choose takes one slot, not two.
        """
        import torch

        top = torch.finfo(order.dtype).max if order.is_floating_point() else torch.iinfo(order.dtype).max
        hitters = scores.topk(int(self.share * self.hitters), dim=-1).indices
        return order.scatter(-1, hitters, top)


@dataclass(frozen=True)
class Pattern(Mixed):
    """A rule that looks at positions alone, so that attention is summed only where a share goes to heavy hitters."""

    @property
    def scored(self) -> bool:  # type: ignore[override]
        return self.share > 0
