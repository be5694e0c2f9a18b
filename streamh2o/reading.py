"""A short answer copied from a short text, and how sure the model is of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from streamh2o.head import logits_function
from streamh2o.prompts import Prompter
from streamh2o.sentences import sentences
from streamh2o.stream import cache_argument

if TYPE_CHECKING:
    from streamh2o.models import Loaded

LONGEST_ANSWER = 40  # tokens
_WORD = re.compile(r"[^\W_]+")
_START = re.compile(r"(?<![^\W_])[^\s]")  # where a word, or a sign before one, begins
_REACH = 12 * LONGEST_ANSWER  # characters that hold the longest answer


@dataclass(frozen=True)
class Reading:
    """What the model answers from a text, in words of the text.

    logprob: log-probability of all of the answer's ids, in nats. new: whether it has a word that the question lacks.
    """

    answer: str
    logprob: float
    new: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """What makes one reading better than another: that it says something, then its probability.

        A mean would favour long stretches of the text, which are easy to go on with once begun.
        """
        return self.new, self.logprob


NOTHING = Reading("", float("-inf"), False)


def read(loaded: Loaded, prompter: Prompter, text: str, question: str) -> Reading:
    """The answer to `question` that `text` holds word for word: of its tokens always the likeliest next one.

    Copying keeps a small model from making things up, and lets every answer be found in the text. The model must not be
    attached to a stream.
    """
    copies = Copies(prompter, text)
    logprob = _greedy(loaded, prompter.ask(text, question), copies, prompter.ends())
    answer = copies.text.strip()
    if not words(answer):
        return NOTHING
    return Reading(answer, logprob, not set(words(answer)) <= set(words(question)))


def words(text: str) -> list[str]:
    """Letters and digits, in lower case."""
    return [word.casefold() for word in _WORD.findall(text)]


class Copies:
    """How an answer can go on that is a stretch of one sentence of `text`, from the start of a word on."""

    def __init__(self, prompter: Prompter, text: str) -> None:
        data = text.encode()
        parts = [data[start:end].decode() for start, end in sentences(data)]
        pieces = dict.fromkeys(part[at.start() :][:_REACH] for part in parts for at in _START.finditer(part))
        self._left = [(piece, *prompter.answer(piece)) for piece in pieces]
        self._taken = 0

    def next(self, ends: set[int]) -> set[int]:
        """Ids that may come next: those that go on copying, and `ends` after a whole word."""
        following = {ids[self._taken] for _, ids, _ in self._left if len(ids) > self._taken}
        return following | ends if self._whole() else following

    def take(self, token: int) -> None:
        """Go on with `token`."""
        self._left = [each for each in self._left if each[1][self._taken : self._taken + 1] == [token]]
        self._taken += 1

    @property
    def text(self) -> str:
        """What has been copied."""
        piece, _, stops = self._left[0] if self._left else ("", [], [])
        return piece[: stops[self._taken - 1]] if self._taken else ""

    def _whole(self) -> bool:
        """Whether a word ends here, in one of the places that are being copied."""
        if not self._taken:
            return False
        rests = [piece[stops[self._taken - 1] :] for piece, _, stops in self._left]
        return any(not rest[:1].isalnum() for rest in rests)


@torch.inference_mode()
def _greedy(loaded: Loaded, prompt: list[int], copies: Copies, ends: set[int]) -> float:
    """Take the likeliest of `copies`, token by token; returns their log-probability among all ids, in nats."""
    decoder: Any = loaded.model.get_decoder()
    logits = logits_function(loaded.model)
    # The cache is kept here, since how the model's output calls it changes between releases, as the argument does.
    cache = DynamicCache(config=loaded.model.config)
    arguments = {cache_argument(loaded.model): cache, "use_cache": True}
    total, feed = 0.0, prompt
    for _ in range(LONGEST_ANSWER):
        allowed = sorted(copies.next(ends))
        if not allowed:
            break
        hidden = decoder(input_ids=torch.tensor([feed], device=loaded.device), **arguments).last_hidden_state
        scores = logits(hidden[0, -1]).float().log_softmax(-1)
        token = allowed[int(scores[allowed].argmax())]
        if token in ends:
            break
        copies.take(token)
        total += float(scores[token])
        feed = [token]
    return total
