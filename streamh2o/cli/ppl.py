"""`streamh2o ppl`: running perplexity of texts of any length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app

if TYPE_CHECKING:
    from streamh2o.policies import Policy
    from streamh2o.report.live import Display
    from streamh2o.report.plots import Curve
    from streamh2o.run import PerplexityRun, RunOptions
    from streamh2o.text import Source

app = make_app()
_INTERRUPTED = 130


@app.command(cls=ManualCommand)
def ppl(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="Files (.gz and .xz too), globs, - for stdin, or hf:DATASET[:CONFIG]:SPLIT[:COLUMN].",
        ),
    ],
    model: opt.Model = "smollm2-135m",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    policy: opt.Policy = "streamh2o",
    cache: opt.Cache = 1024,
    sinks: opt.Sinks = None,
    recent: opt.Recent = None,
    hitters: opt.Hitters = None,
    far: opt.Far = None,
    decay: opt.Decay = None,
    positions: opt.Positions = None,
    per_head: opt.PerHead = "kv",
    chunk: opt.Chunk = 256,
    max_tokens: opt.MaxTokens = None,
    bos: opt.Bos = "auto",
    newline: opt.Newline = "keep",
    errors: opt.Errors = "strict",
    allow_special: opt.AllowSpecial = False,
    json: opt.Json = None,
    log: opt.Log = None,
    nll_out: opt.NllOut = None,
    plot: opt.Plot = None,
    quiet: opt.Quiet = False,
) -> None:
    """Read texts of any length chunk by chunk with a cache of fixed size, and say how well the model predicts them.

    The result is the perplexity over all tokens but the first (which nothing precedes): per token, per byte as bits,
    and per word. Each input starts with an empty cache. Memory and speed do not depend on the length of the text.

    Ctrl-C ends the run after the chunk at hand, with the result so far and all files written; a second Ctrl-C
    quits at once.

    \b
    Examples:
      streamh2o ppl book.txt
      streamh2o ppl 'books/*.txt' --cache 512 --json results.jsonl
      cat book.txt | streamh2o ppl - --policy streamingllm --log run.jsonl
      streamh2o ppl book.txt --json - | jq .ppl
      streamh2o ppl hf:./corpus:train:text --max-tokens 100000 --plot run.png
    """
    from streamh2o.outputs import check_outputs
    from streamh2o.report.plots import check_format
    from streamh2o.sources import open_inputs

    sources = open_inputs(inputs)
    if plot is not None:
        check_format(plot)
    outputs = {"--json": json, "--log": log, "--nll-out": nll_out, "--plot": plot}
    check_outputs(outputs, [*(source.name for source in sources), model])

    import torch

    from streamh2o.machine import physical_cores
    from streamh2o.models import load_model
    from streamh2o.policies import make_policy
    from streamh2o.report.live import make_display
    from streamh2o.run import RunOptions

    knobs: dict[str, Any] = {"far": far, "decay": decay, "positions": positions}
    plan = _Plan(
        sources,
        make_policy(policy, cache=cache, sinks=sinks, recent=recent, hitters=hitters, **knobs),
        RunOptions(
            chunk=chunk,
            max_tokens=max_tokens,
            bos=bos,
            newline=newline,
            errors=errors,
            allow_special=allow_special,
            per_head=per_head,
        ),
        outputs,
        make_display(quiet),
    )
    torch.set_num_threads(threads or physical_cores())
    loaded = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    raise typer.Exit(_run(plan, loaded))


@dataclass(frozen=True)
class _Plan:
    sources: list[Source]
    policy: Policy
    options: RunOptions
    outputs: dict[str, Path | None]
    display: Display


def _run(plan: _Plan, loaded: Any) -> int:
    """Every input in turn, then the results; returns the exit code."""
    from contextlib import ExitStack
    from functools import partial

    from streamh2o.errors import UserError
    from streamh2o.interrupt import Interrupt
    from streamh2o.outputs import LogWriter, LossWriter
    from streamh2o.report.plots import Curve
    from streamh2o.run import Observer, RunFailed, run_perplexity

    results: list[dict[str, Any]] = []
    curves: list[Curve] = []
    failure: UserError | None = None
    log, nll_out = plan.outputs["--log"], plan.outputs["--nll-out"]
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        files: list[Observer] = []
        if log is not None:
            files.append(stack.enter_context(LogWriter(log, several=len(plan.sources) > 1)))
        if nll_out is not None:
            files.append(stack.enter_context(LossWriter(nll_out)))
        display = stack.enter_context(plan.display)
        for number, source in enumerate(plan.sources, 1):
            display.begin(source.name, number, len(plan.sources))
            curves.append(Curve(source.name))
            try:
                observers: list[Observer] = [*files, curves[-1], display]
                results.append(
                    run_perplexity(
                        loaded, source, plan.policy, plan.options, observers, interrupt, partial(_start, display)
                    )
                )
            except UserError as error:
                if isinstance(error, RunFailed):
                    results.append(error.result)
                failure = error
                break
            _end(display, results[-1])
            if interrupt.requested:
                break
    if results:
        _report(plan, results, curves)
    if failure is not None:
        raise failure
    return _INTERRUPTED if interrupt.requested else 0


def _start(display: Display, run: PerplexityRun) -> None:
    if not run.reader.exact:
        display.note(
            f"{run.source.name}: this tokenizer is of an unknown kind, so the ids may differ in a few places from "
            "those of tokenising the whole text at once."
        )


def _end(display: Display, result: dict[str, Any]) -> None:
    name = result["input"]["name"]
    if result["complete"] and result["tokens"] == 0:
        display.note(f"{name}: is empty, so nothing was scored.")
    elif result["complete"] and result["scored"] == 0:
        display.note(f"{name}: has one token, and nothing before it to predict it from; nothing was scored.")


def _report(plan: _Plan, results: list[dict[str, Any]], curves: list[Curve]) -> None:
    from streamh2o.outputs import json_lines, write_whole
    from streamh2o.report.plots import plot_curves
    from streamh2o.report.tables import summary

    json, plot = plan.outputs["--json"], plan.outputs["--plot"]
    print(json_lines(results) if str(json) == "-" else summary(results) + "\n", end="", flush=True)
    if json is not None and str(json) != "-":
        write_whole(json, json_lines(results).encode())
    if plot is not None and any(curve.tokens for curve in curves):
        plot_curves(curves, plot, window=plan.options.window)
