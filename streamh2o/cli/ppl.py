"""`streamh2o ppl`: running perplexity of texts of any length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import CheckpointOptions, ModelOptions, check_checkpoint
from streamh2o.cli.option_groups import expand_groups
from streamh2o.errors import DONE, INTERRUPTED, UsageError, UserError

if TYPE_CHECKING:
    from streamh2o.policies import Policy
    from streamh2o.report.live import Display
    from streamh2o.runs.curve import Curve
    from streamh2o.runs.options import RunOptions
    from streamh2o.runs.perplexity_run import PerplexityRun
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.text import Source

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

    from dataclasses import asdict

    from streamh2o.runs.options import RunOptions

    options = RunOptions(chunk, per_head=per_head, evict=evict, kv_bits=kv_bits, **asdict(reading))
    if ppl_def != "stream":
        from streamh2o.cli import ppl_def as other

        other.refuse_what_it_has_not(ctx, ppl_def)
        ask = other.Ask(ppl_def, context, stride, sources, options, outputs, quiet)
        raise typer.Exit(other.run(ask, machine))
    if context is not None or stride is not None:
        raise UsageError("--context and --stride belong to --ppl-def hf, llamacpp or lmeval; a stream has --cache.")

    from streamh2o.report.live import make_display

    made = caching.make_policy()
    if kv_bits < 16 and (made.recomputes or not made.evicts):
        raise UsageError(f"--kv-bits {kv_bits} is for a cache that evicts, and --policy {made.name} has none.")
    plan = Plan(
        sources,
        made,
        options,
        outputs,
        make_display(quiet),
    )
    keeper = saving.open(plan.display.note)
    with keeper or nullcontext():
        growing = {option: path for option, path in outputs.items() if option != "--json"}
        if keeper is not None:
            machine = check_checkpoint(machine, keeper, sources, plan.described(), growing)
        if keeper is not None and keeper.finished:
            plan.display.note(f"{saving.checkpoint}: this run had come to its end; this is its result.")
            report(plan, keeper.results, keeper.outputs.curves)
            return
        loaded = machine.load()
        if chunk == 0:
            plan = _with_fastest_chunk(plan, loaded)
        if batch > 1:
            from streamh2o.cli import ppl_batch

            raise typer.Exit(ppl_batch.run(plan, loaded, batch))
        raise typer.Exit(_run(plan, loaded, keeper))


@dataclass(frozen=True)
class Plan:
    """What was asked for, apart from the model."""

    sources: list[Source]
    policy: Policy
    options: RunOptions
    outputs: dict[str, Path | None]
    display: Display

    def described(self) -> dict[str, Any]:
        """Every option that the losses depend on."""
        from dataclasses import asdict, fields

        knobs = {each.name: getattr(self.policy, each.name) for each in fields(self.policy)}
        return {**asdict(self.options), "policy": self.policy.name, **knobs}


def _with_fastest_chunk(plan: Plan, loaded: Any) -> Plan:
    from dataclasses import replace

    from streamh2o.runs.fastest_chunk import fastest_chunk

    chunk = fastest_chunk(loaded, plan.policy, plan.options)
    plan.display.note(f"chunk: {chunk}, the fastest here with this model and cache")
    return replace(plan, options=replace(plan.options, chunk=chunk))


def _run(plan: Plan, loaded: Any, keeper: Keeper | None) -> int:
    """Every input in turn, then the results; returns the exit code."""
    from contextlib import ExitStack

    from streamh2o.runs.curve import Curve
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.outputs import LogWriter, LossWriter
    from streamh2o.runs.perplexity_run import RunFailed, run_perplexity
    from streamh2o.runs.progress import Observer

    results: list[dict[str, Any]] = list(keeper.results) if keeper else []
    curves: list[Curve] = keeper.outputs.curves if keeper else []
    marks, saved = (keeper.marks, keeper.state) if keeper else ({}, None)
    failure: UserError | None = None
    log, nll_out = plan.outputs["--log"], plan.outputs["--nll-out"]
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        files: list[Observer] = []
        if log is not None:
            log_writer = stack.enter_context(LogWriter(log, len(plan.sources) > 1, marks.get("--log")))
            files.append(log_writer)
            if keeper:
                keeper.outputs.files["--log"] = log_writer
        if nll_out is not None:
            loss_writer = stack.enter_context(LossWriter(nll_out, marks.get("--nll-out")))
            files.append(loss_writer)
            if keeper:
                keeper.outputs.files["--nll-out"] = loss_writer
        display = stack.enter_context(plan.display)
        for number, source in enumerate(plan.sources[len(results) :], len(results) + 1):
            display.begin(source.name, number, len(plan.sources))
            if len(curves) < number:  # else it was begun before the checkpoint
                curves.append(Curve(source.name))
            try:
                observers: list[Observer] = [*files, curves[-1], display]
                how = (loaded, source, plan.policy, plan.options, observers, interrupt, partial(tell_start, display))
                result = run_perplexity(*how, saved=saved, keep=keeper.keep if keeper else None)
                results.append(result)
                if keeper and result["complete"]:
                    keeper.done(result, interrupt.requested, last=number == len(plan.sources))
            except UserError as error:
                if isinstance(error, RunFailed):
                    results.append(error.result)
                failure = error
                break
            saved = None
            tell_end(display, source, result)
            if interrupt.requested:
                break
    stopped = failure is not None or interrupt.requested
    if keeper and stopped and (where := keeper.where()):
        display.note(where)
    if results:
        report(plan, results, curves, failure)
    elif failure is not None:
        raise failure
    return INTERRUPTED if interrupt.requested else DONE


def tell_start(display: Display, run: PerplexityRun) -> None:
    """What the user should know before an input is read."""
    if not run.reader.exact:
        display.note(
            f"{run.source.name}: this tokenizer is of an unknown kind, so the ids may differ in a few places from "
            "those of tokenising the whole text at once."
        )


def tell_end(display: Display, source: Source, result: dict[str, Any]) -> None:
    """What the user should know of an input that has come to its end."""
    name = source.name
    if source.size and result["input"]["bytes"] > source.size:
        display.note(f"{name}: grew from {source.size} bytes to {result['input']['bytes']} while it was read.")
    if result["halved"]:
        display.note(
            f"{name}: memory ran out {result['halved']} times, and those chunks were read in halves; evictions between "
            "the halves can change the last digits."
        )
    if result["complete"] and result["tokens"] == 0:
        display.note(f"{name}: is empty, so nothing was scored.")
    elif result["complete"] and result["scored"] == 0:
        display.note(f"{name}: has one token, and nothing before it to predict it from; nothing was scored.")


def report(plan: Plan, results: list[dict[str, Any]], curves: list[Curve], failure: UserError | None = None) -> None:
    """Write the files that are written last, print the result, and raise `failure`."""
    from streamh2o.cli.results import give_results
    from streamh2o.report.perplexity_plot import plot_curves
    from streamh2o.report.perplexity_summary import render_perplexity
    from streamh2o.runs.outputs import json_lines
    from streamh2o.terminal import show

    plot = plan.outputs["--plot"]
    files: list[Callable[[], None]] = []
    if plot is not None and any(curve.tokens for curve in curves):
        files.append(partial(plot_curves, curves, plot, window=plan.options.window))
    give_results(plan.outputs["--json"], json_lines(results), lambda: show(render_perplexity(results)), files, failure)
