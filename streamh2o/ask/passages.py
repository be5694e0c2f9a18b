"""Sentences of a text that a question may be about, ranked, and put together as a text to read."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamh2o.ask.retrieve import Part, Retriever, likelihoods
from streamh2o.ask.unmet_words import inner_words, unmet
from streamh2o.text.rereadable import Rereadable
from streamh2o.text.sentences import sentences, squeezed, whole_characters

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

MARGIN = 600  # bytes before and after a part, so that a sentence across its border is whole
LITERAL = 8  # sentences tried because rare words of the question stand in them
MOST = 0.5  # of the rarity of all the question's words
GAP = " ... "  # between passages that do not touch


@dataclass(frozen=True)
class Sentence:
    """Bytes `start` to `end` of the input, which may be about a question.

    gain: by how many nats the question is likelier right after the sentence than without any text. rarity, covered: of
    the question's words that stand in the sentence, in nats, and as a share of that of all its words (see `Wording`).
    unmet: the loss, in nats, of the question's word that is least expected after the sentence.
    """

    start: int
    end: int
    text: bytes
    gain: float
    rarity: float
    covered: float
    unmet: float

    @property
    def score(self) -> float:
        """What ranks it, in nats."""
        return self.gain + self.rarity


class Passages:
    """The text read so far, `end` bytes of it, as sentences."""

    def __init__(self, loaded: Loaded, retriever: Retriever, text: Rereadable, end: int) -> None:
        self._loaded, self._retriever, self._text, self._end = loaded, retriever, text, end
        self._prompter = retriever.prompter

    def ranked(self, question: int, parts: Sequence[Part]) -> list[Sentence]:
        """Sentences of `parts`, the likeliest to be what a question is about first.

        Where one of them covers MOST of the question's words, only the LITERAL best by rarity are tried; else all of
        the first part, and as many of the others.
        """
        ids, stem, wording = self._retriever.ids[question], self._prompter.stem, self._retriever.wording
        found = {span: data for part in parts[:1] for span, data in self._spans(part)}
        others = {span: data for part in parts[1:] for span, data in self._spans(part)}
        if any(wording.covered(question, squeezed(data)) >= MOST for data in (*found.values(), *others.values())):
            found, others = {}, found | others
        literal = sorted(others.items(), key=lambda each: -wording.of_sentence(question, squeezed(each[1])))
        found |= dict(literal[:LITERAL])
        spans = sorted(found)
        texts = [squeezed(found[span]) for span in spans]
        contexts = [[], *(self._prompter.text(text) for text in texts)]
        alone, *after = likelihoods(self._loaded, [(each + stem, ids) for each in contexts])
        words = inner_words(self._prompter, self._retriever.questions[question])
        ranked = [
            Sentence(
                *span,
                found[span],
                float(alone.sum() - losses.sum()),
                wording.of_sentence(question, text),
                wording.covered(question, text),
                unmet(words, alone, losses, text),
            )
            for span, text, losses in zip(spans, texts, after, strict=True)
        ]
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

    def _spans(self, part: Part) -> list[tuple[tuple[int, int], bytes]]:
        return [((start, start + len(data)), data) for start, data in self._sentences(part.start, part.end)]

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
