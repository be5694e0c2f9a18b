"""`streamh2o ppl --ppl-def hf|llamacpp|lmeval`: perplexity as other tools define it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from streamh2o.errors import DONE, INTERRUPTED, UsageError, UserError

if TYPE_CHECKING:
    from streamh2o.cli.model_and_checkpoint import ModelOptions
    from streamh2o.runs.options import RunOptions
    from streamh2o.text import Source

_OF_STREAMS = (
    "policy",
    "cache",
    "sinks",
    "recent",
    "hitters",
    "far",
    "decay",
    "positions",
    "per_head",
    "chunk",
    "batch",
    "evict",
    "kv_bits",
    "device_map",
)
_NOT_HERE = (*_OF_STREAMS, "log", "plot", "checkpoint", "checkpoint_every", "resume")


@dataclass(frozen=True)
class Ask:
    """What was asked for."""

    definition: str
    context: int | None
    stride: int | None
    sources: list[Source]
    options: RunOptions
    outputs: dict[str, Path | None]
    quiet: bool


def refuse_what_it_has_not(ctx: typer.Context, definition: str) -> None:
    """Raise UsageError where an option was given that only a stream has."""
    refused = [*_NOT_HERE, "bos"] if definition != "hf" else _NOT_HERE
    for name in refused:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} belongs to --ppl-def stream; --ppl-def {definition} has none.")


def run(ask: Ask, machine: ModelOptions) -> int:
    """Every input in turn, then the results; returns the exit code."""
    from streamh2o.report.live import make_display
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.outputs import LossWriter
    from streamh2o.runs.windowed import make_definition
    from streamh2o.runs.windowed.dense import DefinedRun

    loaded = machine.load()
    definition = make_definition(ask.definition, loaded.trained_positions, loaded.tokenizer, ask.context, ask.stride)
    results: list[dict[str, Any]] = []
    failure: UserError | None = None
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        observers: list[Any] = []
        if (nll_out := ask.outputs["--nll-out"]) is not None:
            observers.append(stack.enter_context(LossWriter(nll_out)))
        display = stack.enter_context(make_display(ask.quiet))
        for number, source in enumerate(ask.sources, 1):
            display.begin(source.name, number, len(ask.sources))
            with DefinedRun(loaded, source, definition, ask.options) as one:
                try:
                    for progress in one.chunks(interrupt):
                        for observer in (*observers, display):
                            observer(progress)
                except UserError as error:
                    failure = error
                if failure is None or one.windows:
                    results.append(one.result())
            if failure is not None or interrupt.requested:
                break
    if results:
        _report(ask, results, failure)
    elif failure is not None:
        raise failure
    return INTERRUPTED if interrupt.requested else DONE


def _report(ask: Ask, results: list[dict[str, Any]], failure: UserError | None) -> None:
    from streamh2o.cli.results import give_results
    from streamh2o.report.windowed_summary import render_windowed
    from streamh2o.runs.outputs import json_lines
    from streamh2o.terminal import show

    give_results(ask.outputs["--json"], json_lines(results), lambda: show(render_windowed(results)), failure=failure)
