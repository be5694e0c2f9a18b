"""What an answer is: its text, how sure it is, and where in the input it stands. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """A sentence of the input: bytes `start` to `end` (its end not included), the line it begins on, its text.

    score: by how many nats the question is likelier after it than without any text.
    """

    start: int
    end: int
    line: int
    quote: str
    score: float


@dataclass(frozen=True)
class Answer:
    """confidence: 0 to 1; found: whether that is enough to believe that the text answers the question."""

    question: str
    answer: str
    confidence: float
    found: bool
    evidence: tuple[Evidence, ...]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Answer:
        """The answer that gave `to_dict`, also by way of JSON."""
        return cls(**{**data, "evidence": tuple(Evidence(**each) for each in data["evidence"])})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {**asdict(self), "evidence": [asdict(each) for each in self.evidence]}


@dataclass(frozen=True)
class Answers:
    """An answer to each question, in their order. They can be iterated over.

    tokens: of the input that were read. complete: whether all of the input was read, and all questions answered.
    """

    answers: tuple[Answer, ...]
    tokens: int
    complete: bool

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: plain numbers, strings and lists."""
        return {"answers": [each.to_dict() for each in self.answers]}
