"""The whole text in the cache, as far as the model was trained."""

from dataclasses import dataclass
from typing import ClassVar

from streamh2o.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Evicts nothing; a text longer than the model's trained length is an error. The dense baseline."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "everything, up to the trained length"
    scored: ClassVar[bool] = False
    evicts: ClassVar[bool] = False
    default_sinks: ClassVar[int] = 0

    @classmethod
    def split(cls, cache: int, sinks: int) -> tuple[int, int]:
        return cache - sinks, 0
