"""How the next token is chosen, as options say it. Imports no torch, so that a wrong value is refused at once."""

from __future__ import annotations

from dataclasses import dataclass

from streamh2o.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest token, as `greedy` does. top_k: among so many likeliest tokens (0: all). top_p:
    among the likeliest that together have this probability (1: all). min_p: among those with at least this share of the
    likeliest's probability (0: all). repetition_penalty: divides the logits of the last `repeat_last` tokens (1: none).
    seed: of the random numbers; None draws one.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.1
    repeat_last: int = 256
    greedy: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("--temperature", self.temperature, 0, 100),
            ("--top-k", self.top_k, 0, 2**31),
            ("--top-p", self.top_p, 0, 1),
            ("--min-p", self.min_p, 0, 1),
            ("--repetition-penalty", self.repetition_penalty, 0.01, 100),
            ("--repeat-last", self.repeat_last, 0, 2**20),
            ("--seed", self.seed or 0, 0, 2**63 - 1),
        ):
            if not least <= value <= most:
                raise UsageError(f"{option} is {value}; it must lie between {least} and {most}.")
