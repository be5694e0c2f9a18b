"""`streamh2o ppl --batch N`: several inputs side by side."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from streamh2o.cli import ppl
from streamh2o.errors import DONE, INTERRUPTED, UserError

if TYPE_CHECKING:
    from streamh2o.runs.progress import Observer, Progress


class InOrder:
    """Hands the chunks of input after input to `observer`, although they come mixed; waits with those of later ones."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._first = 0  # the input whose chunks go through at once
        self._held: dict[int, list[Progress]] = {}

    def __call__(self, number: int, progress: Progress) -> None:
        if self._observer is None:
            return
        if number == self._first:
            self._observer(progress)
        else:
            self._held.setdefault(number, []).append(progress)

    def ended(self, ended: Any) -> None:
        """The inputs whose numbers are in `ended` give no more chunks."""
        while self._first in ended:
            self._release(self._first + 1)

    def _release(self, number: int) -> None:
        self._first = number
        for progress in self._held.pop(number, ()):
            self(number, progress)

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, *exc: object) -> None:
        """No input gives more chunks."""
        for number in sorted(self._held):
            self._release(number)


def run(plan: ppl.Plan, loaded: Any, size: int) -> int:
    """All inputs, `size` at a time, then the results in the order of the inputs; returns the exit code."""
    from streamh2o.runs.batch_run import BatchRun
    from streamh2o.runs.curve import Curve
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.outputs import LogWriter, LossWriter

    failure: UserError | None = None
    log, nll_out = plan.outputs["--log"], plan.outputs["--nll-out"]
    curves = [Curve(source.name) for source in plan.sources]
    batch = BatchRun(loaded, plan.sources, plan.policy, plan.options, size, partial(ppl.tell_start, plan.display))
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        log_writer = stack.enter_context(LogWriter(log, len(plan.sources) > 1)) if log is not None else None
        loss_writer = stack.enter_context(LossWriter(nll_out)) if nll_out is not None else None
        display = stack.enter_context(plan.display)
        display.begin(f"{len(plan.sources)} inputs, {size} at a time")
        try:
            with InOrder(loss_writer) as losses, closing(batch.chunks(interrupt)) as chunks:
                for number, progress in chunks:
                    curves[number](progress)
                    if log_writer is not None:
                        log_writer(progress)
                    losses(number, progress)
                    losses.ended(batch.results)
                    display(batch.progress())
        except UserError as error:
            failure = error
        for number in sorted(batch.results):
            ppl.tell_end(display, plan.sources[number], batch.results[number])
    results = [batch.results[number] for number in sorted(batch.results)]
    if results:
        ppl.report(plan, results, curves, failure)
    elif failure is not None:
        raise failure
    return INTERRUPTED if interrupt.requested else DONE
