"""The one loop over inputs and their chunks, whether they run in turn, side by side, or as another tool defines it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from streamh2o.errors import UserError
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.progress import Display, Progress
from streamh2o.runs.run_files import RunFiles
from streamh2o.text import Source


class Runs(Protocol):
    """`InTurn` or `BatchRun`. results: by the number of the source, of those that have ended or were cut short."""

    sources: Sequence[Source]
    results: dict[int, dict[str, Any]]

    def chunks(self, interrupt: Interrupt | None = None) -> Generator[tuple[int, Progress], None, None]: ...

    def progress(self) -> Progress: ...


@dataclass(frozen=True)
class Scored:
    """results: in the order of the inputs, of those that gave any. failure: what ended the run early, if it failed."""

    results: list[dict[str, Any]]
    failure: UserError | None = None


def score_inputs(
    runs: Runs,
    files: RunFiles,
    display: Display = Display(),  # noqa: B008 (holds nothing)
    interrupt: Interrupt | None = None,
) -> Scored:
    """Run to the end, to a failure, or until `interrupt` asks to stop; `files` and `display` get every chunk."""
    failure: UserError | None = None
    try:
        try:
            with closing(runs.chunks(interrupt)) as chunks:
                for number, progress in chunks:
                    files.add(number, progress, runs.results)
                    display(runs.progress())
        finally:
            files.finish()
    except UserError as error:
        failure = error
    return Scored([runs.results[number] for number in sorted(runs.results)], failure)
