"""A short answer copied from a short text, and how sure the model is of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamh2o.models.prompts import Prompter
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.probe_tree import ProbeTree
from streamh2o.text.sentences import sentences

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

LONGEST_ANSWER = 40  # tokens
TOGETHER = 4  # places where an answer may begin that are gone on with in one pass
PASSES = 4  # such passes at most, the likeliest places first
SINKS = 4
_WORD = re.compile(r"[^\W_]+")
_START = re.compile(r"(?<![^\W_])[^\s]")  # where a word, or a sign before one, begins
_REACH = 12 * LONGEST_ANSWER  # characters that hold the longest answer


@dataclass(frozen=True)
class Reading:
    """What the model answers from a text, in words of the text; "" where the text has no word that the question lacks.

    logprob: log-probability of the answer's ids and of its end after them, in nats.
    """

    answer: str
    logprob: float


NOTHING = Reading("", float("-inf"))


def words(text: str) -> list[str]:
    """Letters and digits, in lower case."""
    return [word.casefold() for word in _WORD.findall(text)]


@dataclass(frozen=True)
class Copy:
    """What an answer may be that begins at one place of a text: `piece`, to the end of its sentence.

    ids: its tokens, at most LONGEST_ANSWER. stops: characters of `piece` up to the end of each.
    """

    piece: str
    ids: list[int]
    stops: list[int]

    def wholes(self, question: frozenset[str]) -> Iterator[tuple[int, str]]:
        """Answers that end after a whole word and have a word that the question lacks: (ids, text) each."""
        for number, stop in enumerate(self.stops, 1):
            answer = self.piece[:stop].strip()
            if not self.piece[stop : stop + 1].isalnum() and not question.issuperset(words(answer)):
                yield number, answer


def copies(prompter: Prompter, text: str) -> list[Copy]:
    """Every place of `text` where an answer may begin: at a word, to go on within its sentence."""
    data = text.encode()
    parts = [data[start:end].decode() for start, end in sentences(data)]
    result = []
    for piece in dict.fromkeys(part[at.start() :][:_REACH] for part in parts for at in _START.finditer(part)):
        ids, stops = prompter.answer(piece)
        result.append(Copy(piece, ids[:LONGEST_ANSWER], stops[:LONGEST_ANSWER]))
    return [copy for copy in result if copy.ids]


class Reader:
    """Reads short texts with `loaded` and answers from them; what all prompts begin with is read once.

    cache: the most tokens of a prompt.
    """

    def __init__(self, loaded: Loaded, prompter: Prompter, cache: int) -> None:
        trained = loaded.trained_positions
        chunk = min(256, max(LONGEST_ANSWER, trained // 4))
        self.cache = min(cache, trained - chunk)
        self._prompter = prompter
        self._ends = sorted(prompter.ends())
        self._stream = ChunkStream(
            loaded.model, make_policy("streamingllm", cache=self.cache, sinks=SINKS), chunk=chunk, kernel=loaded.kernel
        )
        self._prefix = _common(prompter.ask("A b.", "Who?"), prompter.ask("In c,", "What?"))
        self._empty = self._stream.state()
        self._feed(self._prefix)
        self._begun = self._stream.state()

    def read(self, text: str, question: str) -> Reading:
        """The likeliest answer to `question` among all stretches of one sentence of `text`, from word to word.

        Copying keeps a small model from making things up, and lets every answer be found in the text. The likelihood is
        that of the whole answer with its end, since the likeliest first word often begins a copy of the question.
        """
        after = self._after(self._prompter.ask(text, question))
        asked = frozenset(words(question))
        left = sorted(copies(self._prompter, text), key=lambda copy: -float(after[copy.ids[0]]))
        best = NOTHING
        for _ in range(PASSES):
            if not left or after[left[0].ids[0]] <= best.logprob:  # no copy is likelier than its first id
                break
            batch, left = self._batch(left)
            for reading in self._readings(batch, after, asked):
                best = max(best, reading, key=lambda each: each.logprob)
        return best

    @torch.inference_mode()
    def _after(self, prompt: list[int]) -> Tensor:
        """Log-probabilities of what follows `prompt`, in nats: [vocabulary]."""
        size = len(self._prefix)
        if size and prompt[:size] == self._prefix and len(prompt) > size:
            self._stream.load_state(*self._begun)
            prompt = prompt[size:]
        else:
            self._stream.load_state(*self._empty)
        return _logprobs(self._feed(prompt), self._stream)

    @torch.inference_mode()
    def _feed(self, ids: Sequence[int]) -> Tensor:
        """The state after the last of `ids`: [hidden_size]."""
        for piece in torch.tensor([list(ids)]).split(self._stream.chunk, dim=1):
            hidden = self._stream.feed(piece, score=False).hidden[0, -1]
        return hidden

    def _batch(self, left: list[Copy]) -> tuple[list[Copy], list[Copy]]:
        """The first of `left` that go into one pass, and the rest."""
        count = size = 0
        while count < min(TOGETHER, len(left)) and size + len(left[count].ids) <= self._stream.chunk:
            size += len(left[count].ids)
            count += 1
        return left[:count], left[count:]

    @torch.inference_mode()
    def _readings(self, batch: Sequence[Copy], after: Tensor, asked: frozenset[str]) -> Iterator[Reading]:
        """All answers that begin like one of `batch`. after: log-probabilities of the first id, [vocabulary]."""
        tree = ProbeTree([], [copy.ids for copy in batch], after.device)
        logprobs = _logprobs(self._stream.probe(torch.tensor([tree.ids]), tree.branches)[0], self._stream)
        for copy, places in zip(batch, tree.places, strict=True):
            total = after[copy.ids[0]] + torch.cat(
                [after.new_zeros(1), logprobs[places[:-1], copy.ids[1:]].double().cumsum(0)]
            )
            total = total + logprobs[places][:, self._ends].logsumexp(-1)
            for number, answer in copy.wholes(asked):
                yield Reading(answer, float(total[number - 1]))


def _logprobs(hidden: Tensor, stream: ChunkStream) -> Tensor:
    return stream.logits(hidden).float().log_softmax(-1)


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What both begin with."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return list(one[:size])
