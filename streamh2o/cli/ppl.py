"""`streamh2o ppl`: running perplexity of texts of any length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import CheckpointOptions, ModelOptions, check_checkpoint
from streamh2o.cli.option_groups import expand_groups
from streamh2o.cli.ppl_def import refuse_stream_options
from streamh2o.errors import DONE, INTERRUPTED, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.models.loaded import Loaded
    from streamh2o.policies import Policy
    from streamh2o.runs.curve import Curve
    from streamh2o.runs.options import RunOptions
    from streamh2o.runs.progress import Display
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.runs.score_inputs import Runs, Scored
    from streamh2o.text import Source

    Render = Callable[[list[dict[str, Any]]], RenderableType]

app = make_app()


@app.command(cls=ManualCommand)
@expand_groups
def ppl(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="Files (.gz and .xz too), globs, - for stdin, or hf:DATASET[:CONFIG]:SPLIT[:COLUMN].",
        ),
    ],
    *,
    machine: ModelOptions,
    caching: opt.CacheOptions,
    per_head: opt.PerHead = "kv",
    chunk: opt.ChunkOrAuto = 256,
    evict: opt.Evict = "chunk",
    kv_bits: opt.KvBits = 16,
    ppl_def: opt.PplDef = "stream",
    context: opt.Context = None,
    stride: opt.Stride = None,
    batch: opt.Batch = 1,
    rows: opt.Rows = False,
    reading: opt.ReadOptions,
    json: opt.Json = None,
    log: opt.Log = None,
    nll_out: opt.NllOut = None,
    plot: opt.Plot = None,
    quiet: opt.Quiet = False,
    saving: CheckpointOptions,
) -> None:
    """Read texts of any length chunk by chunk with a cache of fixed size, and say how well the model predicts them.

    The result is the perplexity over all tokens but the first (which nothing precedes): per token, per byte as bits,
    and per word. Each input starts with an empty cache. Memory and speed do not depend on the length of the text.

    Ctrl-C ends the run after the chunk at hand, with the result so far and all files written; a second Ctrl-C
    quits at once.

    With --checkpoint DIR the run is saved once a minute, and when it is stopped; the same command with --resume then
    goes on with the same digits. Inputs that were finished are not run again.

    \b
    Examples:
      streamh2o ppl book.txt
      streamh2o ppl 'books/*.txt' --cache 512 --json results.jsonl
      cat book.txt | streamh2o ppl - --policy streamingllm --log run.jsonl
      streamh2o ppl book.txt --json - | jq .ppl
      streamh2o ppl 'books/*.txt' --batch 4
      streamh2o ppl hf:./corpus:train:text --max-tokens 100000 --plot run.png
      streamh2o ppl book.txt --log run.jsonl --checkpoint run --resume
      streamh2o ppl wiki.test.raw --ppl-def llamacpp --context 512
    """
    from streamh2o.report.live import make_display
    from streamh2o.report.perplexity_plot import check_format
    from streamh2o.runs.outputs import check_outputs
    from streamh2o.text.sources import open_inputs

    if rows and not any(name.startswith("hf:") for name in inputs):
        raise UsageError(
            "--rows makes inputs of the rows of a data set; name one as hf:DATASET[:CONFIG]:SPLIT[:COLUMN]."
        )
    sources = open_inputs(inputs, rows)
    if plot is not None:
        check_format(plot)
    outputs = {"--json": json, "--log": log, "--nll-out": nll_out, "--plot": plot}
    check_outputs(outputs, [*(source.name for source in sources), machine.model])
    if chunk == 0 and (saving.checkpoint is not None or ppl_def != "stream"):
        raise UsageError("--chunk auto can turn out otherwise next time; give a number with --checkpoint or --ppl-def.")
    if saving.checkpoint is not None and batch > 1:
        raise UsageError("--checkpoint saves one input at a time; leave it or --batch out.")

    from streamh2o.runs.options import RunOptions

    options = RunOptions(chunk, per_head=per_head, evict=evict, kv_bits=kv_bits, **asdict(reading))
    task = Task(sources, options, outputs, make_display(quiet))
    if ppl_def != "stream":
        refuse_stream_options(ctx, ppl_def)
        raise typer.Exit(_run_windowed(task, machine, ppl_def, context, stride))
    if context is not None or stride is not None:
        raise UsageError("--context and --stride belong to --ppl-def hf, llamacpp or lmeval; a stream has --cache.")
    policy = caching.make_policy()
    if kv_bits < 16 and (policy.recomputes or not policy.evicts):
        raise UsageError(f"--kv-bits {kv_bits} is for a cache that evicts, and --policy {policy.name} has none.")
    raise typer.Exit(_run_streams(task, machine, policy, batch, saving))


@dataclass(frozen=True)
class Task:
    """What to read and how, and where its results go."""

    sources: list[Source]
    options: RunOptions
    outputs: dict[str, Path | None]
    display: Display


def _run_windowed(task: Task, machine: ModelOptions, ppl_def: str, context: int | None, stride: int | None) -> int:
    """Perplexity as another tool defines it; returns the exit code."""
    from streamh2o.report.windowed_summary import render_windowed
    from streamh2o.runs.in_turn import InTurn
    from streamh2o.runs.windowed import make_definition
    from streamh2o.runs.windowed.windowed_run import WindowedRun

    loaded = machine.load()
    definition = make_definition(ppl_def, loaded.trained_positions, loaded.tokenizer, context, stride)
    runs = InTurn(task.sources, lambda source, _: WindowedRun(loaded, source, definition, task.options), task.display)
    return _score(task, runs, render_windowed)


def _run_streams(task: Task, machine: ModelOptions, policy: Policy, batch: int, saving: CheckpointOptions) -> int:
    """Perplexity of streams, in turn or side by side; returns the exit code."""
    from streamh2o.report.perplexity_summary import render_perplexity
    from streamh2o.runs.batch_run import BatchRun
    from streamh2o.runs.in_turn import InTurn
    from streamh2o.runs.perplexity_run import PerplexityRun
    from streamh2o.runs.score_inputs import Scored

    keeper = saving.open(task.display.note)
    with keeper or nullcontext():
        if keeper is not None:
            described = {**asdict(task.options), "policy": policy.name, **asdict(policy)}
            growing = {option: path for option, path in task.outputs.items() if option != "--json"}
            machine = check_checkpoint(machine, keeper, task.sources, described, growing)
            if keeper.finished:
                task.display.note(f"{saving.checkpoint}: this run had come to its end; this is its result.")
                _report(task, Scored(keeper.results), keeper.outputs.curves, render_perplexity)
                return DONE
        loaded = machine.load()
        if task.options.chunk == 0:
            task = _with_fastest_chunk(task, loaded, policy)
        options, display = task.options, task.display
        if batch > 1:
            return _score(task, BatchRun(loaded, task.sources, policy, options, batch, display), render_perplexity)
        runs = InTurn(
            task.sources,
            lambda source, saved: PerplexityRun(loaded, source, policy, options, saved),
            display,
            keeper,
        )
        return _score(task, runs, render_perplexity, keeper)


def _with_fastest_chunk(task: Task, loaded: Loaded, policy: Policy) -> Task:
    from streamh2o.runs.fastest_chunk import fastest_chunk

    chunk = fastest_chunk(loaded, policy, task.options)
    task.display.note(f"chunk: {chunk}, the fastest here with this model and cache")
    return replace(task, options=replace(task.options, chunk=chunk))


def _score(task: Task, runs: Runs, render: Render, keeper: Keeper | None = None) -> int:
    """Run all inputs and give their results; returns the exit code."""
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.run_files import RunFiles
    from streamh2o.runs.score_inputs import score_inputs

    files = RunFiles(task.sources, task.outputs["--log"], task.outputs["--nll-out"], keeper)
    with Interrupt() as interrupt, files, task.display as display:
        scored = score_inputs(runs, files, display, interrupt)
        stopped = scored.failure is not None or interrupt.requested
        if keeper and stopped and (where := keeper.where()):
            display.note(where)
    if scored.results:
        _report(task, scored, files.curves, render)
    elif scored.failure is not None:
        raise scored.failure
    return INTERRUPTED if interrupt.requested else DONE


def _report(task: Task, scored: Scored, curves: list[Curve], render: Render) -> None:
    from streamh2o.cli.results import give_results
    from streamh2o.report.perplexity_plot import plot_curves
    from streamh2o.runs.outputs import json_lines
    from streamh2o.terminal import show

    plot, files = task.outputs["--plot"], []
    if plot is not None and any(curve.tokens for curve in curves):
        files.append(partial(plot_curves, curves, plot, window=task.options.window))
    lines = json_lines(scored.results)
    give_results(task.outputs["--json"], lines, lambda: show(render(scored.results)), files, scored.failure)
