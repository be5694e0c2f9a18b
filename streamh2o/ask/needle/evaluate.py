"""The needle-in-a-haystack evaluation: trials by methods, cell by cell, each saved when it is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.ask.answer import Answer
from streamh2o.ask.answer_run import answer_questions
from streamh2o.ask.ask_cache import ask_stream, ask_with_all
from streamh2o.ask.needle.methods import Method
from streamh2o.ask.needle.trials import Asked, Trial
from streamh2o.ask.read_passage import LONGEST_ANSWER, words
from streamh2o.errors import UsageError
from streamh2o.models.prompts import Prompter
from streamh2o.runs.cell_key import cell_key
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.runs.outputs import write_whole
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Observer

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

SCHEMA = 2  # of a cell's file; count it up when what a cell holds, or how it is computed, changes


@dataclass(frozen=True)
class Outcome:
    """The answer to one question, and whether it is right.

    right: the answer holds the key, or, where the text does not say it, the question counts as not found. placed,
    placed_first: one of the passages shown, or the first, is where the text says it. found, placed, placed_first,
    confidence: None for methods that give none.
    """

    kind: str
    question: str
    key: str
    depth: float | None
    answer: str
    right: bool
    found: bool | None = None
    placed: bool | None = None
    placed_first: bool | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class NeedleCell:
    """One trial by one method."""

    trial: str
    length: int
    method: str
    cache: int
    tokens: int
    seconds: float
    outcomes: tuple[Outcome, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> NeedleCell:
        """What `to_dict` gave."""
        return cls(**{**data, "outcomes": tuple(Outcome(**each) for each in data["outcomes"])})


Wanted = list[tuple[Trial, Method]]


def plan(loaded: Loaded, trials: Sequence[Trial], methods: Sequence[Method]) -> tuple[Wanted, Wanted]:
    """Every trial by every method, trials outermost: those that the model can hold, and those that it can't.

    Raises UsageError where the model is too short for a question after a full cache.
    """
    prompter = Prompter(loaded.tokenizer)
    longest = LONGEST_ANSWER + max(len(prompter.ask("", each.question)) for trial in trials for each in trial.asked)
    for method in methods:
        if method.policy is not None and method.cache + longest > loaded.trained_positions:
            raise UsageError(
                f"--cache {method.cache} and a question need {method.cache + longest} positions, the model was trained "
                f"on {loaded.trained_positions}; lower --cache."
            )
    fitting: Wanted = []
    too_long: Wanted = []
    for trial in trials:
        for method in methods:
            (fitting if method.fits(loaded, trial) else too_long).append((trial, method))
    return fitting, too_long


def evaluate(
    loaded: Loaded,
    wanted: Wanted,
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    interrupt: Interrupt | None = None,
    observer: Observer = lambda _: None,
    begin: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[NeedleCell]:
    """The cells of `wanted` in order; one that `out` holds is not run again. Ends early if interrupted.

    begin: called before a cell runs, with its name, its number and how many there are.
    """
    for number, (trial, method) in enumerate(wanted, 1):
        path = out / f"{_key(loaded, trial, method, options)}.json"
        cell = _load(path)
        if cell is None:
            begin(f"{trial.name}, {method.label}", number, len(wanted))
            cell = _run_cell(loaded, trial, method, options, interrupt, observer)
            if cell is None:
                return
            write_whole(path, (json.dumps(cell.to_dict(), indent=1) + "\n").encode())
        yield cell


def _key(loaded: Loaded, trial: Trial, method: Method, options: RunOptions) -> str:
    parts = {
        "trial": trial.key,
        "method": method.label,
        "knobs": asdict(method.policy) if method.policy else None,
        "cache": method.cache,
        "chunk": options.chunk,
    }
    return cell_key(SCHEMA, loaded, parts)


def _load(path: Path) -> NeedleCell | None:
    """The cell if it is there and whole."""
    try:
        return NeedleCell.of(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _run_cell(
    loaded: Loaded, trial: Trial, method: Method, options: RunOptions, interrupt: Interrupt | None, observer: Observer
) -> NeedleCell | None:
    """One cell; None where `interrupt` stopped it before its end."""
    began = time.perf_counter()
    run = _answer_again if method.label == "answer" else _ask_prompt if method.policy is None else _ask_cache
    outcome = run(loaded, trial, method, options, interrupt, observer)
    if outcome is None:
        return None
    tokens, outcomes = outcome
    seconds = time.perf_counter() - began
    return NeedleCell(trial.name, trial.length, method.label, method.cache, tokens, seconds, tuple(outcomes))


Outcomes = tuple[int, list[Outcome]]  # the tokens that were read, and what came of each question


def _answer_again(
    loaded: Loaded, trial: Trial, method: Method, options: RunOptions, interrupt: Interrupt | None, observer: Observer
) -> Outcomes | None:
    """What `streamh2o answer` does."""
    questions = [each.question for each in trial.asked]
    answers = answer_questions(
        loaded,
        trial.source,
        questions,
        cache=method.cache,
        options=options,
        observers=[observer],
        interrupt=interrupt,
    )
    if not answers.complete:
        return None
    return answers.tokens, [_judged(asked, answer) for asked, answer in zip(trial.asked, answers, strict=True)]


def _ask_prompt(
    loaded: Loaded, trial: Trial, method: Method, options: RunOptions, interrupt: Interrupt | None, observer: Observer
) -> Outcomes:
    """All of the text before each question."""
    prompter, text = Prompter(loaded.tokenizer), trial.text.decode()
    outcomes = [_said(asked, ask_with_all(loaded, prompter, text, asked.question)) for asked in trial.there]
    return len(prompter.text(text)), outcomes


def _ask_cache(
    loaded: Loaded, trial: Trial, method: Method, options: RunOptions, interrupt: Interrupt | None, observer: Observer
) -> Outcomes | None:
    """The questions put to what the cache has kept of the text."""
    assert method.policy is not None
    prompter = Prompter(loaded.tokenizer)
    with PerplexityRun(loaded, trial.source, method.policy, replace(options, score=False)) as run:
        for progress in run.chunks(interrupt):
            observer(progress)
        if not run.complete:
            return None
        return run.tokens, [_said(asked, ask_stream(run.stream, prompter, asked.question)) for asked in trial.there]


def _said(asked: Asked, answer: str) -> Outcome:
    """An answer without confidence and evidence."""
    return Outcome(asked.kind, asked.question, asked.key, asked.depth, answer, holds(answer, asked.key))


def _judged(asked: Asked, answer: Answer) -> Outcome:
    if asked.start is None or asked.end is None:
        right, placed = not answer.found, None
    else:
        start, end = asked.start, asked.end
        right = holds(answer.answer, asked.key)
        placed = [passage.start < end and start < passage.end for passage in answer.evidence]
    return Outcome(
        asked.kind,
        asked.question,
        asked.key,
        asked.depth,
        answer.answer,
        right,
        answer.found,
        None if placed is None else any(placed),
        None if placed is None else any(placed[:1]),
        answer.confidence,
    )


def holds(answer: str, key: str) -> bool:
    """Whether the words of `key` follow each other in `answer`, whatever their case."""
    said, wanted = words(answer), words(key)
    return any(said[start : start + len(wanted)] == wanted for start in range(len(said) - len(wanted) + 1))
