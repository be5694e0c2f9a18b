"""Answers to questions about a text of any length: stream it once, then read again where the questions point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from streamh2o.ask.confidence import FOUND, confidence, most_confidence
from streamh2o.ask.passages import Passages, Sentence
from streamh2o.ask.read_passage import Reader, Reading
from streamh2o.ask.retrieve import Part, Retriever
from streamh2o.errors import UsageError, UserError
from streamh2o.models.prompts import Prompter, plain_ids
from streamh2o.policies import make_policy
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Observer
from streamh2o.runs.saving.checks import telling_damage
from streamh2o.text.rereadable import Rereadable
from streamh2o.text.sentences import squeezed

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.text import Source

SINKS = 4
PARTS = 3  # read again per question, at most
WORTH = 0.5  # of the best part's score, which another must have to be read again too
CHUNKS = 2  # of the text, after which the questions are put to it
EVIDENCE = 3  # passages shown per question
ANSWER_ROOM = 64  # positions left for an answer and for what joins passages


@dataclass(frozen=True)
class Evidence:
    """A sentence of the input: bytes `start` to `end` (its end not included), the line it begins on, its text.

    score: by how many nats the question is likelier after it than without any text.
    """

    start: int
    end: int
    line: int
    quote: str
    score: float


@dataclass(frozen=True)
class Answer:
    """confidence: 0 to 1; found: whether that is enough to believe that the text answers the question."""

    question: str
    answer: str
    confidence: float
    found: bool
    evidence: tuple[Evidence, ...]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Answer:
        """What `dataclasses.asdict` gave, also by way of JSON."""
        return cls(**{**data, "evidence": tuple(Evidence(**each) for each in data["evidence"])})


@dataclass(frozen=True)
class SoFar:
    """Answers from the first `token` tokens of a text that has not ended yet."""

    token: int
    answers: list[Answer]


@dataclass
class Standing:
    """Where the answering stands between two chunks or two answers, as `--checkpoint` saves it."""

    run: PerplexityRun
    retriever: Retriever
    answers: list[Answer] = field(default_factory=list)  # from all of the text
    looked: int = 0  # bytes of the text that the questions have been put to
    unseen: int = 0  # chunks since

    @property
    def tokens(self) -> int:
        return self.run.tokens

    def look(self, text: Rereadable) -> None:
        """Put the questions to what has come since they were put last."""
        end = self.run.bytes_read
        if end > self.looked:
            self._require_positions()
            self.retriever.look(self.run.stream, Part(self.looked, end), text.read(self.looked, end))
        self.looked, self.unseen = end, 0

    def _require_positions(self) -> None:
        """Raise UserError where the model has learned one position for each token, and has none left for a question."""
        stream, needed = self.run.stream, self.retriever.longest
        if stream.learned_positions and stream.tokens + needed > stream.trained:
            fitting = stream.trained - needed - (stream.tokens - self.run.tokens)
            raise UserError(
                f"This model has learned {stream.trained} positions, one for each token of a text, and the questions "
                f"need {needed} of them; use --max-tokens {fitting}, or a model with rotary positions."
            )

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, counts = self.run.state()
        own = {"answers": [asdict(each) for each in self.answers], "looked": self.looked, "unseen": self.unseen}
        return tensors | self.retriever.state(), {**counts, **own}

    def load_state(self, tensors: dict[str, torch.Tensor], counts: dict[str, Any]) -> None:
        """What `run` has not taken of it."""
        self.answers = [Answer.of(each) for each in counts["answers"]]
        self.looked, self.unseen = int(counts["looked"]), int(counts["unseen"])
        if not 0 <= self.looked <= self.run.bytes_read:
            raise ValueError
        if self.looked:
            self.retriever.load_state(tensors, self.looked)


def answer_questions(
    loaded: Loaded,
    source: Source,
    questions: Sequence[str],
    *,
    cache: int = 1024,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    pin: str = "",
    every: int | None = None,
    so_far: Callable[[SoFar], None] = lambda _: None,
    observers: Sequence[Observer] = (),
    interrupt: Interrupt | None = None,
    streamed: Callable[[], None] = lambda: None,
    saved: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
    keep: Callable[[Standing, bool], None] | None = None,
) -> tuple[list[Answer], bool]:
    """Answer `questions` about `source` in one pass over it, and a short second look per question.

    cache: the most tokens that attention ever spans, while streaming (without the chunk at hand) and when passages are
    read again. pin: an instruction that stays in the sinks while the text streams, and before what is read again.
    every: call `so_far` after each so many tokens, or a chunk later. observers: called after every chunk; streamed:
    once the text has passed. interrupt: stops the streaming, the answers then being those of the text so far, or ends
    the answering after the question at hand. saved: of `Standing.state`, to go on from. keep: called when that may be
    saved, with True when the text has ended or the answering stops. Returns the answers, and whether everything was
    read and answered. Raises UserError where the input can't be read or is empty, UsageError where the questions or
    sizes do not fit.
    """
    keep = keep or (lambda *_: None)
    prompter = Prompter(loaded.tokenizer, pin)
    _check_sizes(loaded, prompter, questions, cache, every)
    retriever = Retriever(loaded, prompter, questions, options.chunk)
    pinned = plain_ids(loaded.tokenizer, f"{prompter.pin}\n\n") if prompter.pin else []
    sinks = max(SINKS, len(pinned))
    chunks = max(1, min(CHUNKS, (cache - sinks) // options.chunk))
    window = sinks + chunks * options.chunk + options.chunk // 2
    policy = make_policy("streamingllm", cache=min(cache, window), sinks=sinks)
    with Rereadable(source) as text:
        with PerplexityRun(loaded, text.source, policy, replace(options, score=False), saved) as run:
            standing = Standing(run, retriever)
            if saved is not None:
                with telling_damage(source.name):
                    standing.load_state(*saved)
            token = run.tokens
            told = token // every if every else 0
            for ids in torch.tensor([pinned]).split(options.chunk, dim=1) if pinned and saved is None else ():
                run.stream.feed(ids, score=False)
            for progress in run.chunks(interrupt):
                token = progress.token
                standing.unseen += 1
                if standing.unseen == chunks:
                    standing.look(text)
                for observer in observers:
                    observer(progress)
                if every and not standing.unseen and token // every > told:
                    told = token // every
                    with run.stream.paused():
                        second_look = _SecondLook(loaded, retriever, text, cache, progress.byte)
                        so_far(SoFar(token, [second_look.answer(n) for n in range(len(questions))]))
                keep(standing, False)
            complete, byte = run.complete, run.bytes_read
            if not complete:
                keep(standing, True)  # before a look that a run without a break would not take
            standing.look(text)
            if complete:
                keep(standing, True)
        stopped = interrupt is not None and interrupt.requested
        if token == 0:
            if stopped:
                raise KeyboardInterrupt
            raise UserError(f"{source.name}: nothing was read, so there is nothing to answer from.")
        streamed()
        second_look = _SecondLook(loaded, retriever, text, cache, byte)
        answers = standing.answers if complete else []
        for number in range(len(answers), len(questions)):
            if interrupt is not None and interrupt.requested and not stopped:
                keep(standing, True)
                return answers, False
            answers.append(second_look.answer(number))
            if complete:
                keep(standing, False)
        return answers, complete


def _check_sizes(loaded: Loaded, prompter: Prompter, questions: Sequence[str], cache: int, every: int | None) -> None:
    if not questions:
        raise UsageError("There is no question; ask with -q or --questions.")
    if every is not None and every < 1:
        raise UsageError(f"--every {every}: must be at least 1 token.")
    if cache > loaded.trained_positions:
        raise UsageError(
            f"--cache {cache} exceeds the {loaded.trained_positions} positions this model was trained on; lower it."
        )
    needed = 2 * ANSWER_ROOM + max(len(prompter.ask("", question)) for question in questions)
    if cache < needed:
        raise UsageError(f"--cache {cache} is too small to read a passage in; here it must be at least {needed}.")


class _SecondLook:
    """Answers from the first `end` bytes of a text, read again where `retriever` points.

    The model must not be attached to a stream.
    """

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
