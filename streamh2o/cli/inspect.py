"""`streamh2o inspect`: what the cache kept, as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.errors import DONE, INTERRUPTED, UsageError

if TYPE_CHECKING:
    from streamh2o.runs.inspect.cache_contents import CacheContents

app = make_app()


@app.command(cls=ManualCommand)
@expand_groups
def inspect(
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="A file (.gz and .xz too), - for stdin, or hf:DATASET[:CONFIG]:SPLIT[:COLUMN].",
        ),
    ],
    *,
    machine: Annotated[ModelOptions, Without("weights", "device_map")],
    caching: opt.CacheOptions,
    per_head: opt.PerHead = "kv",
    chunk: opt.Chunk = 256,
    reading: opt.ReadOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            rich_help_panel="Output",
            show_default="NAME.inspect.html here",
            help="The page.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE|-",
            rich_help_panel="Output",
            help="All of it, and the result of ppl, as one object.",
        ),
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Stream a text under any policy and show what the cache holds at its end: which tokens, in which layers and
    heads, how old, and how high the policy ranks them.

    The page is one HTML file without scripts. It has a map of where in the text the hitters of each layer come from,
    their ages, how long hitters stay, the tokens that most heads hold, and the text around all held tokens, shaded by
    the share of heads that hold each.

    Memory does not depend on the length of the text. The text of a pipe is kept in a private temporary file meanwhile,
    which goes away with the command.

    Ctrl-C ends the reading after the chunk at hand and shows the cache as it is then; a second Ctrl-C quits at once.

    \b
    Examples:
      streamh2o inspect book.txt
      streamh2o inspect book.txt --policy h2o --cache 512 --max-tokens 20000 --out h2o.html
      zcat book.gz | streamh2o inspect - --json - | jq '.kept.tokens[0]'
    """
    from dataclasses import asdict

    from streamh2o.runs.outputs import check_outputs
    from streamh2o.text.sources import open_inputs

    sources = open_inputs([input])
    if len(sources) != 1:
        raise UsageError(f"{input}: {len(sources)} files match, and a page is of one text; name one.")
    source = sources[0]
    out = out or Path(_page_name(source.name))
    check_outputs({"--out": out, "--json": json}, [source.name, machine.model])

    from streamh2o.report.live import make_display
    from streamh2o.runs.inspect.cache_contents import inspect_source
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.options import RunOptions

    policy = caching.make_policy()
    options = RunOptions(chunk, per_head=per_head, **asdict(reading))
    loaded = machine.load()
    with Interrupt() as interrupt, make_display(quiet) as display:
        display.begin(source.name)
        inspection = inspect_source(loaded, source, policy, options, [display], interrupt)
    _report(inspection, out, json)
    raise typer.Exit(INTERRUPTED if interrupt.requested else DONE)


def _page_name(source: str) -> str:
    """NAME.inspect.html for books/NAME.txt.gz, hf:NAME:train or stdin."""
    name = Path(source).name
    for ending in (".gz", ".xz"):
        name = name.removesuffix(ending)
    stem = Path(name).stem or "text"
    return "".join("-" if letter in ':\\?*"<>|' else letter for letter in stem) + ".inspect.html"


def _report(inspection: CacheContents, out: Path, json: Path | None) -> None:
    from streamh2o.cli.results import give_results
    from streamh2o.report.inspect_page import page
    from streamh2o.report.inspect_summary import render_inspection
    from streamh2o.runs.outputs import json_lines, write_whole
    from streamh2o.terminal import show

    def write_page() -> None:
        write_whole(out, page(inspection).encode())

    lines = json_lines([inspection.to_dict()])
    give_results(json, lines, lambda: show(render_inspection(inspection, str(out))), [write_page], inspection.failure)
