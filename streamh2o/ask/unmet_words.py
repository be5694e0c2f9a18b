"""How unexpected the words of a question are after a passage in which they do not stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streamh2o.ask.wording import vocabulary, words_at
from streamh2o.models.prompts import Prompter
from streamh2o.text.sentences import sentences

ASIDE = 0.5  # what a word counts in a sentence without a question mark beside one that has it


@dataclass(frozen=True)
class InnerWord:
    """A word of a question, in lower case, that begins no sentence of it.

    ids: which of the question's ids it has. share: what it counts, 0 to 1.
    """

    word: str
    ids: tuple[int, ...]
    share: float = 1.0


def inner_words(prompter: Prompter, question: str) -> list[InnerWord]:
    """The words of `question` but for those that begin a sentence of it, in order.

    No model can expect a first word ("Tell me ..."), so its loss says nothing about the passage. A sentence beside the
    one that asks ("I need it today.") may say anything, so its words count less.
    """
    stops = [0, *prompter.question_stops(question)]
    data = question.strip().encode("utf-8", "surrogateescape")
    spans = sentences(data, shortest=0)
    asking = [data[a:b].rstrip(b"\"')").endswith((b"?", "？".encode())) for a, b in spans]
    result = []
    for (a, b), asks in zip(spans, asking, strict=True):
        before = len(data[:a].decode("utf-8", "replace"))
        for word, *span in words_at(data[a:b].decode("utf-8", "replace"))[1:]:
            start, end = (before + each for each in span)
            # Ids that are bytes of one character all stop where it ends.
            ids = [n for n, (left, right) in enumerate(pairwise(stops)) if start < right and min(left, right - 1) < end]
            result.append(InnerWord(word, tuple(ids), 1.0 if asks or not any(asking) else ASIDE))
    return result


def unmet(words: Sequence[InnerWord], alone: np.ndarray, after: np.ndarray, text: str) -> float:
    """The largest loss, in nats and times its share, of a word that `text` lacks; 0 where it lacks none.

    alone, after: losses of the question's ids without any text and after `text`, float32 [ids]; a word counts the
    smaller of its two. The form of a question ("the number that ...") is expected after any text. A name or a thing is
    expected only after a text about it. Only the worst word counts, so that long questions are not
    judged more strictly than short ones.
    """
    there = vocabulary(text)
    lacking = [each for each in words if each.word not in there]
    return max((each.share * min(_sum(alone, each), _sum(after, each)) for each in lacking), default=0.0)


def _sum(losses: np.ndarray, word: InnerWord) -> float:
    return float(losses[list(word.ids)].sum())
