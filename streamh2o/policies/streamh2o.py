"""The default: heavy hitters of long-range attention, fading, at their true distance."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy, Positions


@dataclass(frozen=True)
class StreamH2O(Policy):
    """Sinks, recent tokens and the middle tokens that far queries look at.

    Three things differ from plain H2O, and only together do they help: attention from nearby queries does not
    count (`far`), since the window serves those anyway; old attention fades (`decay`), since a novel moves on; and
    hitters stay at their true distance (`positions`) while the sinks keep close. See docs/quality.md.
    """

    name: ClassVar[str] = "streamh2o"
    summary: ClassVar[str] = "sinks, recent and fading long-range hitters at true distance"

    positions: Positions = "distance"
    decay: float = 0.9

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        hitters = min(cache // 4, cache - sinks)
        return cache - sinks - hitters, hitters
