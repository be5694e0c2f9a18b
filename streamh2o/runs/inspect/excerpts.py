"""The text around held tokens, read again from the input, as units that a page can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streamh2o.runs.inspect.kept import HeldTokens, Kept
from streamh2o.runs.inspect.places import AROUND
from streamh2o.text.rereadable import Rereadable

CONTEXT = 12  # tokens shown before and after a held one
FOLD = 24  # a stretch without held tokens that is no longer than this is shown
WINDOW = 1200  # tokens of the recent window that are shown; of a longer one its two ends
assert max(CONTEXT, FOLD) < AROUND


@dataclass(frozen=True)
class Unit:
    """Whole characters: token `first`, and those after it up to `stop` where they share a character with it."""

    first: int
    stop: int
    text: str


@dataclass(frozen=True)
class Excerpt:
    """Neighbouring tokens `first` to `stop`, the end not included."""

    first: int
    stop: int
    units: list[Unit]


@dataclass(frozen=True)
class Excerpts:
    """The text around held tokens, in order. least: tokens that fewer pairs hold are left out of it."""

    parts: list[Excerpt]
    least: int


def read_units(kept: Kept, text: Rereadable, first: int, stop: int) -> list[Unit]:
    """Tokens `first` to `stop` as text; all must be near a held token. Raises UserError where it can't be read.

    Of a character that begins before `first` or ends after `stop` nothing is shown.
    """
    starts = kept.places.borders(first, stop)
    base = int(starts[0])
    data = np.frombuffer(text.read(base, int(starts[-1])), np.uint8)
    offsets = np.minimum(starts - base, len(data))
    inner = np.append(data, 0)[offsets[:-1]] & 0xC0 == 0x80  # begins inside a character
    inner[:1] = False
    borders = np.append(np.flatnonzero(~inner), stop - first).tolist()
    raw = data.tobytes()
    units = []
    for a, b in pairwise(borders):
        cut = a == 0 or b == stop - first
        shown = raw[offsets[a] : offsets[b]].decode("utf-8", "ignore" if cut else "backslashreplace")
        units.append(Unit(first + a, first + b, shown))
    return units


def spans(kept: Kept, tokens: np.ndarray) -> list[tuple[int, int]]:
    """What to show of the text around `tokens` (rising), the sinks and the recent window: rising (first, stop)."""
    centres, window = np.concatenate([tokens, np.arange(kept.sinks)]), _window(kept)
    lows = np.concatenate([centres - CONTEXT, window[:, 0]])
    highs = np.concatenate([centres + CONTEXT + 1, window[:, 1]])
    order = np.argsort(lows, kind="stable")
    lows, highs = np.maximum(lows[order], 0), np.minimum(highs[order], kept.tokens)
    reach = np.maximum.accumulate(highs)
    begins = np.append(True, lows[1:] > reach[:-1] + FOLD)
    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(reach) - 1)
    return list(zip(lows[begins].tolist(), reach[ends].tolist(), strict=True))


def _window(kept: Kept) -> np.ndarray:
    """Stretches of the recent window to show: int64 [n, 2]."""
    first, end, half = kept.tokens - kept.recent, kept.tokens, WINDOW // 2
    if kept.recent > WINDOW:
        return np.array([[first, first + half], [end - half, end]])
    return np.array([[first, end]] if kept.recent else [], np.int64).reshape(-1, 2)


def read_excerpts(kept: Kept, held: HeldTokens, text: Rereadable, most: int) -> Excerpts:
    """The text around held tokens, at most about `most` tokens of it: tokens that few pairs hold go first."""
    for least in [1, *np.unique(held.pairs + 1).tolist()]:
        chosen = spans(kept, held.token[held.pairs >= least])
        if sum(stop - first for first, stop in chosen) <= most:
            break
    return Excerpts([Excerpt(a, b, read_units(kept, text, a, b)) for a, b in chosen], least)


def token_texts(kept: Kept, held: HeldTokens, text: Rereadable) -> Iterator[str]:
    """The text of every held token, in order; a token that is part of a character gives the whole character."""
    tokens = iter(held.token.tolist())
    token = next(tokens, None)
    for first, stop in spans(kept, held.token):
        for unit in read_units(kept, text, first, stop):
            while token is not None and token < unit.stop:
                yield unit.text
                token = next(tokens, None)


def context(kept: Kept, text: Rereadable, token: int) -> tuple[str, str, str]:
    """The text before a held token, its own, and the text after it."""
    units = read_units(kept, text, max(0, token - CONTEXT), min(kept.tokens, token + CONTEXT + 1))
    at = next(number for number, unit in enumerate(units) if unit.first <= token < unit.stop)
    before = "".join(unit.text for unit in units[:at])
    return before, units[at].text, "".join(unit.text for unit in units[at + 1 :])
