"""Which words of the questions stand in a text word for word, and how rare they are there."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from streamh2o.text.sentences import sentences

# Letters and digits in a row; Chinese and Japanese, which put no spaces between words, sign by sign.
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")


def vocabulary(text: str) -> frozenset[str]:
    """The words of `text`, in lower case."""
    return frozenset(word.casefold() for word in _WORD.findall(text))


def words_at(text: str) -> list[tuple[str, int, int]]:
    """The words of `text` in order, in lower case, and the characters at which each begins and ends."""
    return [(match.group().casefold(), *match.span()) for match in _WORD.finditer(text)]


class Wording:
    """Counts of the questions' words in a text that is read part by part.

    The rarity of a word that stands in `df` of `n` parts is ln(n / df), in nats (inverse document frequency). A word of
    every part has none; a name that stands once has most. Sentences are counted as well as parts.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        self._words = [vocabulary(question) for question in questions]
        self._all = frozenset().union(*self._words)
        self.words = sorted(self._all)
        self._in_parts: Counter[str] = Counter()
        self._in_sentences: Counter[str] = Counter()
        self._parts = self._sentences = 0

    def look(self, data: bytes) -> frozenset[str]:
        """The words of all questions that the next part of the text holds; `data` are its bytes, UTF-8."""
        found: set[str] = set()
        for start, end in sentences(data):
            here = vocabulary(data[start:end].decode("utf-8", "replace")) & self._all
            self._in_sentences.update(here)
            self._sentences += 1
            found |= here
        self._in_parts.update(found)
        self._parts += 1
        return frozenset(found)

    def of_part(self, question: int, found: frozenset[str]) -> float:
        """The rarity, in nats, of those of `found` that are words of the question."""
        return _rarity(self._words[question] & found, self._in_parts, self._parts)

    def of_sentence(self, question: int, text: str) -> float:
        """The rarity among sentences, in nats, of the question's words that stand in `text`, a sentence."""
        return _rarity(self._words[question] & vocabulary(text), self._in_sentences, self._sentences)

    def covered(self, question: int, text: str) -> float:
        """The share, 0 to 1, of the rarity of all the question's words that those in `text` have.

        A word that the whole input lacks counts as if it stood in half a sentence.
        """
        missing = self._words[question] - vocabulary(text)
        lacking = sum(self._in_sentences[word] == 0 for word in missing)
        lost = _rarity(missing, self._in_sentences, self._sentences) + lacking * math.log(2 * max(1, self._sentences))
        held = self.of_sentence(question, text)
        return held / (held + lost) if held else 0.0

    def state(self) -> dict[str, Tensor]:
        """The counts, in the order of `words`, to go on from."""
        counts = {"in_parts": self._in_parts, "in_sentences": self._in_sentences}
        tensors = {name: torch.tensor([count[word] for word in self.words]) for name, count in counts.items()}
        return {**tensors, "sizes": torch.tensor([self._parts, self._sentences])}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave. Raises TypeError or ValueError for anything else."""
        if any(tensor.dtype != torch.int64 for tensor in state.values()):
            raise TypeError
        self._parts, self._sentences = state["sizes"].tolist()
        for name, most in (("in_parts", self._parts), ("in_sentences", self._sentences)):
            counts = Counter(dict(zip(self.words, state[name].tolist(), strict=True)))
            if any(not 0 <= count <= most for count in counts.values()):
                raise ValueError
            setattr(self, f"_{name}", counts)


def _rarity(words: Iterable[str], counts: Counter[str], of: int) -> float:
    return sum(math.log(of / counts[word]) for word in words if counts[word])
