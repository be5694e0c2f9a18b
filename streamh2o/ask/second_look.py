"""The second look: answers from the passages that the first pass over a text points to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamh2o.ask.answer import Answer, Evidence
from streamh2o.ask.confidence import FOUND, confidence, most_confidence
from streamh2o.ask.passages import Passages, Sentence
from streamh2o.ask.read_passage import Reader, Reading
from streamh2o.ask.retrieve import Retriever
from streamh2o.text.rereadable import Rereadable
from streamh2o.text.sentences import squeezed

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

PARTS = 3  # read again per question, at most
WORTH = 0.5  # of the best part's score, which another must have to be read again too
EVIDENCE = 3  # passages shown per question


class SecondLook:
    """Answers from the first `end` bytes of a text, read again where `retriever` points."""

    def __init__(self, loaded: Loaded, retriever: Retriever, text: Rereadable, cache: int, end: int) -> None:
        self._loaded, self._retriever, self._text, self._cache = loaded, retriever, text, cache
        self._passages = Passages(loaded, retriever, text, end)
        self._reader = Reader(loaded, retriever.prompter, cache)

    def answer(self, number: int) -> Answer:
        question = self._retriever.questions[number]
        ranked = self._passages.ranked(number, self._retriever.worth_reading(number, PARTS, WORTH))
        if not ranked:  # nothing but white space
            return Answer(question, "", 0.0, False, ())
        top = ranked[:EVIDENCE]
        best = self._read(question, top)
        shown = _with_answer_first(top, best.answer)
        lines = self._text.lines([sentence.start for sentence in shown])
        evidence = tuple(
            Evidence(each.start, each.end, lines[each.start], each.text.decode("utf-8", "replace"), each.score)
            for each in shown
        )
        sure = confidence(best, shown[0])
        return Answer(question, best.answer, sure, sure >= FOUND, evidence)

    def _read(self, question: str, top: Sequence[Sentence]) -> Reading:
        """The best sentence read alone, which does not mislead a small model by others; where that gives no answer to
        believe but might have, the better of it and of all of `top` with their neighbours."""
        alone = self._reader.read(squeezed(top[0].text), question)
        if confidence(alone, top[0]) >= FOUND or most_confidence(top[0]) < FOUND:
            return alone
        room = self._reader.cache - len(self._retriever.prompter.ask("", question))
        together = self._reader.read(self._passages.joined(top, room), question)
        return max(alone, together, key=lambda reading: reading.logprob)


def _with_answer_first(top: Sequence[Sentence], answer: str) -> list[Sentence]:
    """A sentence that holds the answer word for word is better evidence than one that does not."""
    wanted = answer.casefold().rstrip(".")
    return sorted(top, key=lambda each: wanted not in squeezed(each.text).casefold())
