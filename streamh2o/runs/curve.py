"""Perplexity over the tokens of a text: the points of one line of a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streamh2o.errors import UserError

if TYPE_CHECKING:
    from streamh2o.runs.progress import Progress

_MOST_POINTS = 4096


@dataclass
class Curve:
    """Perplexity over tokens: one line of a picture, which takes the progress of a run.

    Memory stays flat however long the text: past 4,096 points every other one is dropped.
    """

    label: str
    tokens: list[int] = field(default_factory=list)
    ppl: list[float] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def __call__(self, progress: Progress) -> None:
        self.add(progress.token, progress.ppl, progress.ppl_window)

    def add(self, token: int, ppl: float | None, window: float | None) -> None:
        """The next point; one without a perplexity is left out."""
        if ppl is None or window is None:
            return
        if self._seen % self._stride == 0:
            self.tokens.append(token)
            self.ppl.append(ppl)
            self.window.append(window)
            if len(self.tokens) > _MOST_POINTS:
                for points in (self.tokens, self.ppl, self.window):
                    del points[1::2]
                self._stride *= 2
        self._seen += 1


def read_log(path: Path) -> list[Curve]:
    """The curves of a log that `--log` wrote, one for each of its inputs.

    A last line that was cut off in mid-write is left out. Raises UserError where the file is missing or no log.
    """
    curves: dict[str, Curve] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    name = line.get("input", path.stem)
                    curve = curves.setdefault(name, Curve(name))
                    curve.add(int(line["token"]), line["ppl"], line["ppl_window"])
                except (ValueError, TypeError, KeyError, AttributeError):
                    if not text.endswith("\n") and curves:
                        break
                    raise UserError(f"{path}: line {number} is not one of a log that --log wrote.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"{path}: can't be read ({reason.lower()}); name a file that --log wrote.") from None
    found = [curve for curve in curves.values() if curve.tokens]
    if not found:
        raise UserError(f"{path}: this log has no perplexity in it yet.")
    return found
