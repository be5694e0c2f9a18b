"""The default: heavy hitters by the recent mean of their long-range attention, at their true distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from streamh2o.errors import UsageError
from streamh2o.policies.base import Policy, Positions

if TYPE_CHECKING:
    from torch import Tensor

MOST_HITTERS = 320  # by default; what a larger budget has beyond is better spent on the window
LEAST_QUERIES = 16  # a mean of fewer queries is noise


@dataclass(frozen=True)
class StreamH2O(Policy):
    """Keeps sinks, recent tokens and the middle tokens that far queries look at.

    Five things differ from plain H2O; docs/notebook/quality.md has what each is worth:
    - attention from nearby queries does not count (`far`), since the window serves those anyway;
    - old attention fades (`decay`), since a novel moves on;
    - the score is divided by what the queries that could give it count together, so it is a fading mean. A sum
      favours those that have been kept for long, and a token that has just left the window loses to them however
      much the few queries far enough away look at it;
    - hitters stay at their true distance (`positions`) while the sinks keep close;
    - a hitter that has got older than `reach` tokens goes first, since the model hardly uses what is that far away.

    Knobs: reach, in tokens (0: no limit but the length the model was trained on); by default 4 times the cache. The
    others are those of every policy, with their defaults changed.

    Source: this project.
    """

    name: ClassVar[str] = "streamh2o"

    positions: Positions = "distance"
    decay: float = 0.9
    reach: int = 0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        """Half hitters, and at most `MOST_HITTERS`."""
        recent, hitters = super().split(cache, sinks)
        fewer = max(0, hitters - MOST_HITTERS)
        return recent + fewer, hitters - fewer

    @classmethod
    def defaults(cls, cache: int, recent: int) -> dict[str, int]:
        """`far` is half the window, so that a token leaving it has been judged by as many queries, and at most 128."""
        return {"far": max(0, min(128, recent // 2)), "reach": 4 * cache}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach and self.reach < self.cache:
            raise UsageError(f"The knob reach is {self.reach}; it must be 0 or at least the cache, here {self.cache}.")

    def divisor(self, age: Tensor) -> Tensor:
        queries = (age - self.far).clamp(min=LEAST_QUERIES)  # that counted, newest weight 1
        counted = queries.float() if self.decay == 1 else 1 - self.decay ** (queries / 256)  # up to a factor all share
        return counted.masked_fill(age > self.reach, math.inf) if self.reach else counted
