"""The whole text in the cache, as far as the model was trained."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keeps every token; a text longer than the model's trained length is an error.

    Knobs: none that change it.

    Source: dense attention, the baseline of arXiv 2306.14048 and 2309.17453.
    """

    name: ClassVar[str] = "full"
    scored: ClassVar[bool] = False
    evicts: ClassVar[bool] = False
    default_sinks: ClassVar[int] = 0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return cache - sinks, 0
