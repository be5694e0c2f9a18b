"""`streamh2o compare`: several policies and budgets on the same tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import expand_groups
from streamh2o.cli.values import folder, listed, numbers
from streamh2o.errors import DONE, INTERRUPTED, UsageError
from streamh2o.extras import installed, notes_on_missing

if TYPE_CHECKING:
    from streamh2o.runs.compare import Cell, Compared

app = make_app()


@app.command(cls=ManualCommand)
@expand_groups
def compare(
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
    policy: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            rich_help_panel="Cache",
            help="Policies, with knobs after colons: streamh2o,h2o:recent=64:decay=0.9,streamingllm.",
        ),
    ] = "streamh2o,h2o,streamingllm",
    cache: Annotated[
        str,
        typer.Option(metavar="N,N,N", rich_help_panel="Cache", help="Budgets: slots kept per layer and KV head."),
    ] = "256,512,1024",
    sinks: opt.Sinks = None,
    per_head: opt.PerHead = "kv",
    chunk: opt.Chunk = 256,
    evict: opt.Evict = "chunk",
    kv_bits: opt.KvBits = 16,
    against_full: Annotated[
        bool,
        typer.Option(
            "--against-full",
            rich_help_panel="Cache",
            help="Also the model with all of the text before it, where the text fits.",
        ),
    ] = False,
    reading: opt.ReadOptions,
    first: Annotated[
        int,
        typer.Option(
            "--from",
            metavar="N",
            min=0,
            rich_help_panel="Input",
            help="Count losses from token N on; the ones before only fill the cache.",
        ),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            parser=folder("--out"),
            rich_help_panel="Output",
            help="Where tables, pictures and finished cells go.",
        ),
    ] = Path("results/compare"),
    json: opt.Json = None,
    quiet: opt.Quiet = False,
) -> None:
    """Run several policies and cache sizes on the same tokens: a table, and two pictures.

    The table gives perplexity, its difference to StreamingLLM at the same cache size (with a standard error, from
    blocks of 500 tokens), speed, and the memory of keys and values; below it the geometric mean of several inputs.
    DIR then holds running.png (perplexity over tokens), budget.png (perplexity over cache size), compare.json,
    compare.parquet, and a file per cell.

    A cell that is done is not run again: start the same command again after Ctrl-C, or add policies, sizes or inputs.

    \b
    Examples:
      streamh2o compare book.txt
      streamh2o compare 'books/*.txt' --cache 256,512 --max-tokens 30000 --out results/books
      streamh2o compare book.txt --policy streamh2o,h2o:recent=64,streamingllm,local
      streamh2o compare book.txt --max-tokens 8000 --against-full
      streamh2o compare book.txt --from 100000
    """
    from dataclasses import asdict

    from streamh2o.runs.compare import make_columns
    from streamh2o.runs.outputs import check_outputs
    from streamh2o.text.sources import open_inputs

    sources = open_inputs(inputs)
    check_outputs({"--json": json}, [*(source.name for source in sources), machine.model])
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: this is a file; name a folder.")
    specs = listed(policy, "--policy")
    columns = make_columns([spec for spec in specs if spec != "full"], numbers(cache, "--cache"), sinks)

    from streamh2o.report.live import make_display
    from streamh2o.runs.compare import compare_inputs
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.options import RunOptions

    options = RunOptions(chunk, per_head=per_head, evict=evict, kv_bits=kv_bits, **asdict(reading))
    loaded = machine.load()
    with make_display(quiet) as display, Interrupt() as interrupt:
        for note in notes_on_missing({"matplotlib": "running.png and budget.png", "pyarrow": "compare.parquet"}):
            display.note(note)
        compared = compare_inputs(
            loaded,
            sources,
            columns,
            options,
            against_full=against_full or "full" in specs,
            first=first,
            out=out,
            display=display,
            interrupt=interrupt,
        )
    if compared.cells:
        _report(compared, out, json, first)
    elif compared.failure is not None:
        raise compared.failure
    raise typer.Exit(DONE if compared.complete else INTERRUPTED)


def _report(compared: Compared, out: Path, json: Path | None, first: int) -> None:
    """Files to `out`, tables to stdout."""
    from streamh2o.cli.results import give_results
    from streamh2o.report.comparison import document, write_json, write_parquet
    from streamh2o.report.comparison_plots import plot_budget, plot_running
    from streamh2o.runs.outputs import json_lines

    cells, complete = compared.cells, compared.complete
    files = [partial(write_json, cells, complete, out / "compare.json", first)]
    if installed("pyarrow"):
        files.append(partial(write_parquet, cells, out / "compare.parquet", first))
    if installed("matplotlib"):
        files += [
            partial(plot_running, cells, out / "running.png"),
            partial(plot_budget, cells, out / "budget.png", first),
        ]
    give_results(
        json, json_lines([document(cells, complete, first)]), partial(_show, cells, out, first), files, compared.failure
    )


def _show(cells: list[Cell], out: Path, first: int) -> None:
    from streamh2o.report.comparison import rows
    from streamh2o.report.comparison_tables import render_comparison
    from streamh2o.terminal import show
    from streamh2o.terminal_safe import visible

    show(render_comparison(rows(cells, first)))
    print(f"\nFiles: {visible(str(out))}", flush=True)
