"""Recent tokens alone: the window that collapses once the first tokens leave it."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class Local(Policy):
    """Keeps the newest tokens and nothing else.

    Knobs: none that change it, for it has neither hitters nor sinks unless --sinks asks for some.

    Source: "window attention", a baseline of arXiv 2306.14048 and 2309.17453.
    """

    name: ClassVar[str] = "local"
    scored: ClassVar[bool] = False
    default_sinks: ClassVar[int] = 0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return cache - sinks, 0
