"""The needle-in-a-haystack evaluation: trials by methods, cell by cell, each saved when it is done."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.ask.answer import Answer, answer_questions
from streamh2o.ask.ask_cache import ask_stream, ask_with_all
from streamh2o.ask.needle.trials import Asked, Trial
from streamh2o.ask.read_passage import LONGEST_ANSWER, words
from streamh2o.errors import UsageError
from streamh2o.models.prompts import Prompter
from streamh2o.policies import Policy
from streamh2o.runs.compare import make_columns
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.runs.outputs import write_whole
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Observer
from streamh2o.versions import __version__

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

ROOM = 256  # positions for examples, question and answer beside the text


@dataclass(frozen=True)
class Method:
    """A way to answer. `answer`: the product's, which reads again; `full`: the whole text in one prompt; else the text
    streams under `policy`, and the questions are put to what the cache has kept."""

    label: str
    cache: int
    policy: Policy | None = None

    def fits(self, loaded: Loaded, trial: Trial) -> bool:
        """Whether the model can hold what the method wants it to hold."""
        if self.label != "full":
            return True
        tokens = len(loaded.tokenizer(trial.text.decode(), add_special_tokens=False).input_ids)
        return tokens + ROOM <= loaded.trained_positions


@dataclass(frozen=True)
class Outcome:
    """What came of one question.

    right: the answer holds the key, or, where the text does not say it, the question counts as not found. placed: the
    first passage shown, or any of them, is where the text says it. found, placed, placed_first: None where the method
    does not tell.
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
class Cell:
    """One trial by one method."""

    trial: str
    length: int
    method: str
    cache: int
    tokens: int
    seconds: float
    outcomes: tuple[Outcome, ...]

    def json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Cell:
        """What `json` gave."""
        return cls(**{**data, "outcomes": tuple(Outcome(**each) for each in data["outcomes"])})


def make_methods(specs: Sequence[str], cache: int) -> list[Method]:
    """`answer`, `full`, or a policy as `compare` takes it. Raises UsageError for others."""
    methods = []
    for spec in dict.fromkeys(specs):
        if spec in ("answer", "full"):
            methods.append(Method(spec, cache))
        else:
            methods.append(Method(spec, cache, make_columns([spec], [cache])[0].policy))
            if methods[-1].policy is not None and methods[-1].policy.recomputes:
                raise UsageError(f"--policy {spec}: keeps nothing that could be asked; leave it out.")
    return methods


def evaluate(
    loaded: Loaded,
    trials: Sequence[Trial],
    methods: Sequence[Method],
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    interrupt: Interrupt | None = None,
    observer: Observer = lambda _: None,
    begin: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Cell]:
    """Every trial by every method that it fits, in order; a cell that `out` holds is not run again.

    Ends early if interrupted. begin: called before a cell runs, with its name, its number and how many there are.
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
    wanted = [(trial, method) for trial in trials for method in methods if method.fits(loaded, trial)]
    for number, (trial, method) in enumerate(wanted, 1):
        path = out / f"{_key(loaded, trial, method, options)}.json"
        cell = _load(path)
        if cell is None:
            begin(f"{trial.name}, {method.label}", number, len(wanted))
            cell = _run(loaded, trial, method, options, interrupt, observer)
            if cell is None:
                return
            write_whole(path, (json.dumps(cell.json(), indent=1) + "\n").encode())
        yield cell


def _key(loaded: Loaded, trial: Trial, method: Method, options: RunOptions) -> str:
    parts = {
        "version": __version__,
        "trial": trial.key,
        "model": loaded.fingerprint,
        "method": method.label,
        "knobs": asdict(method.policy) if method.policy else None,
        "cache": method.cache,
        "chunk": options.chunk,
        "dtype": str(loaded.dtype),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _load(path: Path) -> Cell | None:
    """The cell if it is there and whole."""
    try:
        return Cell.of(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _run(
    loaded: Loaded, trial: Trial, method: Method, options: RunOptions, interrupt: Interrupt | None, observer: Observer
) -> Cell | None:
    """One cell; None where `interrupt` stopped it before its end."""
    began, tokens = time.perf_counter(), 0

    def count(progress: Any) -> None:
        nonlocal tokens
        tokens = progress.token
        observer(progress)

    if method.label == "answer":
        answers, complete = answer_questions(
            loaded,
            trial.source,
            [each.question for each in trial.asked],
            cache=method.cache,
            options=options,
            observers=[count],
            interrupt=interrupt,
        )
        outcomes = [_judged(asked, answer) for asked, answer in zip(trial.asked, answers, strict=False)]
        if not complete or len(outcomes) < len(trial.asked):
            return None
    else:
        prompter = Prompter(loaded.tokenizer)
        there = [asked for asked in trial.asked if asked.start is not None]
        if method.policy is None:
            text = trial.text.decode()
            said = [ask_with_all(loaded, prompter, text, asked.question) for asked in there]
            tokens = len(prompter.text(text))
        else:
            with PerplexityRun(loaded, trial.source, method.policy, replace(options, score=False)) as run:
                for progress in run.chunks(interrupt):
                    count(progress)
                if not run.complete:
                    return None
                said = [ask_stream(run.stream, prompter, asked.question) for asked in there]
        outcomes = [
            Outcome(asked.kind, asked.question, asked.key, asked.depth, answer, holds(answer, asked.key))
            for asked, answer in zip(there, said, strict=True)
        ]
    seconds = time.perf_counter() - began
    return Cell(trial.name, trial.length, method.label, method.cache, tokens, seconds, tuple(outcomes))


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
