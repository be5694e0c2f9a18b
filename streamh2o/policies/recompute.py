"""A sliding window recomputed for every chunk: slow, and the ceiling of what a window can know."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class Recompute(Policy):
    """Keeps no keys: it reads the `cache` tokens before each chunk anew, so that no key carries older context.

    Knobs: none that change it.

    Source: "sliding window with re-computation", arXiv 2309.17453, Figure 1 (c).
    """

    name: ClassVar[str] = "recompute"
    scored: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    default_sinks: ClassVar[int] = 0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return cache - sinks, 0
