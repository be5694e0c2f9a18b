"""Sentences of a text that a question may be about, ranked, and put together as a text to read."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from streamh2o.prompts import Prompter
from streamh2o.retrieve import Part, likelihoods
from streamh2o.sentences import sentences, squeezed, whole_characters
from streamh2o.spool import Rereadable

if TYPE_CHECKING:
    from streamh2o.models import Loaded

MARGIN = 600  # bytes before and after a part, so that a sentence across its border is whole
GAP = " ... "  # between passages that do not touch


@dataclass(frozen=True)
class Sentence:
    """Bytes `start` to `end` of the input. after: what the question's ids lose right after it, float32 [ids], nats;
    alone: what they lose without any text."""

    start: int
    end: int
    text: bytes
    after: np.ndarray
    alone: np.ndarray

    @property
    def score(self) -> float:
        """By how many nats the question is likelier after this sentence than without any text."""
        return float(self.alone.sum() - self.after.sum())

    @property
    def explained(self) -> float:
        """The share of the question's loss without a text that this sentence takes away."""
        return self.score / float(self.alone.sum())


class Passages:
    """The text read so far, `end` bytes of it, as sentences."""

    def __init__(self, loaded: Loaded, prompter: Prompter, text: Rereadable, end: int) -> None:
        self._loaded, self._prompter, self._text, self._end = loaded, prompter, text, end

    def ranked(self, question: str, parts: Sequence[Part]) -> list[Sentence]:
        """The sentences of `parts`, the one after which the question is likeliest first.

        The model must not be attached to a stream.
        """
        found = {
            (start, start + len(data)): data for part in parts for start, data in self._sentences(part.start, part.end)
        }
        ids, stem = self._prompter.question(question), self._prompter.stem
        spans = sorted(found)
        contexts = [[], *(self._prompter.text(squeezed(found[span])) for span in spans)]
        alone, *losses = likelihoods(self._loaded, [(context + stem, ids) for context in contexts])
        ranked = [Sentence(*span, found[span], after, alone) for span, after in zip(spans, losses, strict=True)]
        return sorted(ranked, key=lambda sentence: -sentence.score)

    def joined(self, ranked: Sequence[Sentence], room: int) -> str:
        """The best sentences, each with its neighbours where they fit, in source order: at most `room` tokens."""
        chosen: list[tuple[int, int]] = []
        result = ""
        for sentence in ranked:
            for span in (self._with_neighbours(sentence), (sentence.start, sentence.end)):
                wider = merged([*chosen, span])
                text = GAP.join(squeezed(self._text.read(*each)) for each in wider)
                if len(self._prompter.text(text)) <= room:
                    chosen, result = wider, text
                    break
        return result

    def _sentences(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Sentences that lie, at least in part, in bytes `start` to `stop`: (offset, bytes)."""
        first = max(0, start - MARGIN)
        data = self._text.read(first, min(self._end, stop + MARGIN))
        left, right = whole_characters(data)
        if first == 0 and data.startswith(BOM_UTF8):
            left = len(BOM_UTF8)
        data, first = data[left:right], first + left
        return [(first + a, data[a:b]) for a, b in sentences(data) if first + b > start and first + a < stop]

    def _with_neighbours(self, sentence: Sentence) -> tuple[int, int]:
        """The sentence with the one before and the one after it, as bytes of the input."""
        around = self._sentences(sentence.start - MARGIN, sentence.end + MARGIN)
        before = [start for start, data in around if start + len(data) <= sentence.start]
        after = [start + len(data) for start, data in around if start >= sentence.end]
        return (before or [sentence.start])[-1], (after or [sentence.end])[0]


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in source order, with spans that touch or overlap made one."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
