"""What grows with a run over several inputs: the log, the file of losses, and the curves of the picture."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from streamh2o.runs.curve import Curve
from streamh2o.runs.growing_file import GrowingFile, LogWriter, LossWriter
from streamh2o.runs.progress import Observer, Progress
from streamh2o.text import Source

if TYPE_CHECKING:
    from streamh2o.runs.saving.keeper import Keeper


class RunFiles:
    """Files and curves of `sources`, written while entered; with a `keeper` they go on where it left them.

    log, nll_out: as of `LogWriter` and `LossWriter`. curves: one for each source. Raises UserError where a file cannot
    be written.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        log: Path | None = None,
        nll_out: Path | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._sources, self._log, self._nll_out, self._keeper = sources, log, nll_out, keeper
        saved = keeper.outputs.curves if keeper else []
        self.curves = [*saved, *(Curve(source.name) for source in sources[len(saved) :])]
        self._files = ExitStack()
        self._write_log: LogWriter | None = None
        self._losses = InOrder(None)

    def __enter__(self) -> RunFiles:
        marks = self._keeper.marks if self._keeper else {}
        files: dict[str, GrowingFile] = {}
        with ExitStack() as opened:
            if self._log is not None:
                writer = LogWriter(self._log, len(self._sources) > 1, marks.get("--log"))
                files["--log"] = self._write_log = opened.enter_context(writer)
            if self._nll_out is not None:
                losses = opened.enter_context(LossWriter(self._nll_out, marks.get("--nll-out")))
                files["--nll-out"], self._losses = losses, InOrder(losses)
            self._files = opened.pop_all()
        if self._keeper:
            self._keeper.outputs.files, self._keeper.outputs.curves = files, self.curves
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def add(self, number: int, progress: Progress, ended: Collection[int]) -> None:
        """A chunk of the source of this number. ended: those that give no more chunks."""
        self.curves[number](progress)
        if self._write_log is not None:
            self._write_log(progress)
        self._losses.add(number, progress)
        self._losses.end(ended)

    def finish(self) -> None:
        """No source gives more chunks."""
        self._losses.finish()


class InOrder:
    """Hands the chunks of source after source to `observer`, although they come mixed; those of later ones wait."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._first = 0  # the source whose chunks go through at once
        self._waiting: dict[int, list[Progress]] = {}

    def add(self, number: int, progress: Progress) -> None:
        if self._observer is None:
            return
        if number == self._first:
            self._observer(progress)
        else:
            self._waiting.setdefault(number, []).append(progress)

    def end(self, numbers: Collection[int]) -> None:
        """These sources give no more chunks."""
        while self._first in numbers:
            self._release(self._first + 1)

    def finish(self) -> None:
        """No source gives more chunks."""
        for number in sorted(self._waiting):
            self._release(number)

    def _release(self, number: int) -> None:
        self._first = number
        for progress in self._waiting.pop(number, ()):
            self.add(number, progress)
