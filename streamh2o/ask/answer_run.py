"""Questions about a text of any length: stream it once, then read again where the questions point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from streamh2o.ask.answer import Answer, Answers
from streamh2o.ask.retrieve import Part, Retriever
from streamh2o.ask.second_look import SecondLook
from streamh2o.errors import UsageError, UserError
from streamh2o.models.prompts import Prompter, plain_ids
from streamh2o.policies import Policy, make_policy
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Observer
from streamh2o.runs.saving.checks import naming_damage
from streamh2o.text.rereadable import Rereadable

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.text import Source

SINKS = 4
CHUNKS = 2  # of the text, after which the questions are put to it
ANSWER_ROOM = 64  # positions left for an answer and for what joins passages
Saved = tuple[dict[str, torch.Tensor], dict[str, Any]]


class AnswerRun:
    """Questions about one text, between two chunks or two answers, as `--checkpoint` saves it.

    every: chunks after which the questions are put to the text. answers: those from all of the text so far.
    """

    def __init__(
        self, loaded: Loaded, run: PerplexityRun, retriever: Retriever, text: Rereadable, cache: int, every: int
    ) -> None:
        self._loaded, self._run, self._retriever, self._text = loaded, run, retriever, text
        self._cache, self._every = cache, every
        self.answers: list[Answer] = []
        self._looked = 0  # bytes of the text that the questions have been put to
        self._unseen = 0  # chunks since
        self._reported = run.tokens  # at the last answers so far

    @property
    def tokens(self) -> int:
        return self._run.tokens

    def chunk_read(self) -> None:
        """Put the questions to the text if it is time."""
        self._unseen += 1
        if self._unseen == self._every:
            self.look()

    def look(self) -> None:
        """Put the questions to what has come since they were put last."""
        end = self._run.bytes_read
        if end > self._looked:
            self._require_positions()
            self._retriever.look(self._run.stream, Part(self._looked, end), self._text.read(self._looked, end))
        self._looked, self._unseen = end, 0

    def _require_positions(self) -> None:
        """Raise UserError where the model has learned one position for each token, and has none left for a question."""
        stream, needed = self._run.stream, self._retriever.longest
        if stream.learned_positions and stream.tokens + needed > stream.trained:
            fitting = stream.trained - needed - (stream.tokens - self._run.tokens)
            raise UserError(
                f"This model has learned {stream.trained} positions, one for each token of a text, and the questions "
                f"need {needed} of them; use --max-tokens {fitting}, or a model with rotary positions."
            )

    def answers_so_far(self, tokens: int) -> Answers | None:
        """Answers from what was read, where so many more `tokens` were read and the questions were put to them."""
        if self._unseen or self.tokens // tokens <= self._reported // tokens:
            return None
        self._reported = self.tokens
        second_look = self._second_look()
        answers = [second_look.answer(number) for number in range(len(self._retriever.questions))]
        return Answers(tuple(answers), self.tokens, False)

    def answer_one_by_one(self, stop: Callable[[], bool], keep: Callable[[AnswerRun, bool], None]) -> Answers:
        """The answers that are still to be given, once the text has been read, until `stop()`."""
        second_look, complete = self._second_look(), self._run.complete
        while len(self.answers) < len(self._retriever.questions):
            if stop():
                keep(self, True)
                return Answers(tuple(self.answers), self.tokens, False)
            self.answers.append(second_look.answer(len(self.answers)))
            if complete:
                keep(self, False)
        return Answers(tuple(self.answers), self.tokens, complete)

    def _second_look(self) -> SecondLook:
        return SecondLook(self._loaded, self._retriever, self._text, self._cache, self._run.bytes_read)

    def state(self) -> Saved:
        tensors, counts = self._run.state()
        own = {"answers": [each.to_dict() for each in self.answers], "looked": self._looked, "unseen": self._unseen}
        return tensors | self._retriever.state(), {**counts, **own}

    def load_state(self, tensors: dict[str, torch.Tensor], counts: dict[str, Any]) -> None:
        """The rest of what `state` gave: the `PerplexityRun` has been given its own part."""
        self.answers = [Answer.of(each) for each in counts["answers"]]
        self._looked, self._unseen = int(counts["looked"]), int(counts["unseen"])
        if not 0 <= self._looked <= self._run.bytes_read:
            raise ValueError
        if self._looked:
            self._retriever.load_state(tensors, self._looked)


def answer_questions(
    loaded: Loaded,
    source: Source,
    questions: Sequence[str],
    *,
    cache: int = 1024,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    pin: str = "",
    every: int | None = None,
    so_far: Callable[[Answers], None] = lambda _: None,
    observers: Sequence[Observer] = (),
    interrupt: Interrupt | None = None,
    streamed: Callable[[], None] = lambda: None,
    saved: Saved | None = None,
    keep: Callable[[AnswerRun, bool], None] = lambda *_: None,
) -> Answers:
    """Answer `questions` about `source` in one pass over it, and a short second look per question.

    cache: the most tokens that attention ever spans, while streaming (without the chunk at hand) and when passages are
    read again. pin: an instruction that stays in the sinks while the text streams, and before what is read again.
    every: call `so_far` after each so many tokens, or a chunk later. observers: called after every chunk; streamed:
    once the text has passed. interrupt: stops the streaming, the answers then being those of the text so far, or ends
    the answering after the question at hand. saved: of `AnswerRun.state`, to go on from. keep: called when that may be
    saved, with True when the text has ended or the answering stops. Raises UserError where the input can't be read or
    is empty, UsageError where the questions or sizes do not fit.
    """
    prompter = Prompter(loaded.tokenizer, pin)
    _check_sizes(loaded, prompter, questions, cache, every)
    retriever = Retriever(loaded, prompter, questions, options.chunk)
    pinned = plain_ids(loaded.tokenizer, f"{prompter.pin}\n\n") if prompter.pin else []
    policy, chunks = _window(max(SINKS, len(pinned)), cache, options.chunk)
    with Rereadable(source) as text:
        with PerplexityRun(loaded, text.source, policy, replace(options, score=False), saved) as run:
            answering = AnswerRun(loaded, run, retriever, text, cache, chunks)
            if saved is not None:
                with naming_damage(source.name):
                    answering.load_state(*saved)
            elif pinned:
                for ids in torch.tensor([pinned]).split(options.chunk, dim=1):
                    run.stream.feed(ids, score=False)
            for progress in run.chunks(interrupt):
                answering.chunk_read()
                for observer in observers:
                    observer(progress)
                if every and (answers := answering.answers_so_far(every)):
                    so_far(answers)
                keep(answering, False)
            if not run.complete:
                keep(answering, True)  # before a look that a run without a break would not take
            answering.look()
            if run.complete:
                keep(answering, True)
        stopped = interrupt is not None and interrupt.requested
        if run.tokens == 0:
            if stopped:
                raise KeyboardInterrupt
            raise UserError(f"{source.name}: nothing was read, so there is nothing to answer from.")
        streamed()
        return answering.answer_one_by_one(lambda: interrupt is not None and interrupt.requested and not stopped, keep)


def _window(sinks: int, cache: int, chunk: int) -> tuple[Policy, int]:
    """What the stream keeps of a text, and after how many chunks the questions are put to it: all of those are kept."""
    chunks = max(1, min(CHUNKS, (cache - sinks) // chunk))
    window = sinks + chunks * chunk + chunk // 2
    return make_policy("streamingllm", cache=min(cache, window), sinks=sinks), chunks


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
