"""Several inputs, one after the other, each from an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.notes import note_end, note_start
from streamh2o.runs.perplexity import RunningPerplexity
from streamh2o.runs.progress import Display, Progress
from streamh2o.text import Source

if TYPE_CHECKING:
    import torch

    from streamh2o.runs.saving.keeper import Keeper, Saveable

    State = tuple[dict[str, torch.Tensor], dict[str, Any]]


class Run(Protocol):
    """The run of one input: `PerplexityRun`, `WindowedRun`."""

    perplexity: RunningPerplexity
    reader: Any
    complete: bool

    def chunks(self, interrupt: Interrupt | None = None) -> Iterator[Progress]: ...

    def result(self) -> dict[str, Any]: ...


class InTurn:
    """The runs of `sources`, each opened by `open_run` when its turn comes.

    open_run: takes the source, and the state to go on from or None. results: by the number of the source, of those that
    have ended or were cut short after a loss. With a `keeper` it goes on after what is finished there, and is saved.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        open_run: Callable[[Source, State | None], AbstractContextManager[Run]],
        display: Display = Display(),  # noqa: B008 (holds nothing)
        keeper: Keeper | None = None,
    ) -> None:
        self.sources = sources
        self.results: dict[int, dict[str, Any]] = dict(enumerate(keeper.results)) if keeper else {}
        self._open_run, self._display, self._keeper = open_run, display, keeper
        self._latest: Progress | None = None

    def chunks(self, interrupt: Interrupt | None = None) -> Generator[tuple[int, Progress], None, None]:
        """Run to the end, or until `interrupt` asks to stop; yields the number of a source after each of its chunks."""
        saved = self._keeper.state if self._keeper else None
        for number in range(len(self.results), len(self.sources)):
            self._display.begin(self.sources[number].name, number + 1, len(self.sources))
            with self._open_run(self.sources[number], saved) as run:
                yield from self._run(number, run, interrupt)
            saved = None
            note_end(self._display, self.sources[number], self.results[number])
            if interrupt and interrupt.requested:
                return

    def _run(self, number: int, run: Run, interrupt: Interrupt | None) -> Generator[tuple[int, Progress], None, None]:
        note_start(self._display, self.sources[number], run.reader)
        try:
            for self._latest in run.chunks(interrupt):
                yield number, self._latest
                if self._keeper:
                    self._keeper.keep(cast("Saveable", run), stopping=False)
            if self._keeper and not run.complete:
                self._keeper.keep(cast("Saveable", run), stopping=True)
        except BaseException:  # whoever takes the chunks may have failed, too
            if run.perplexity.scored:
                self.results[number] = {**run.result(), "complete": False}
            raise
        self.results[number] = run.result()
        if self._keeper and run.complete:
            stopping = interrupt is not None and interrupt.requested
            self._keeper.done(self.results[number], stopping, last=number + 1 == len(self.sources))

    def progress(self) -> Progress:
        """Where the source at hand stands."""
        assert self._latest is not None
        return self._latest
