"""`streamh2o needle`: what is found again in a long text, by length, depth and policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.cli.values import folder, listed, numbers
from streamh2o.errors import DONE, INTERRUPTED, UsageError, UserError
from streamh2o.extras import installed, notes_on_missing

if TYPE_CHECKING:
    from streamh2o.ask.needle.evaluate import NeedleCell
    from streamh2o.ask.needle.methods import Method
    from streamh2o.ask.needle.tasks import Item
    from streamh2o.ask.needle.trials import Trial
    from streamh2o.models.loaded import Loaded

app = make_app()
_FACTS = "Facts"


@app.command(cls=ManualCommand)
@expand_groups
def needle(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            show_default=False,
            help="Texts that become one haystack, in this order (globs too); with --task, the task's file.",
        ),
    ],
    *,
    lengths: Annotated[
        str,
        typer.Option(metavar="N,N,N", rich_help_panel=_FACTS, help="Tokens of text around the facts."),
    ] = "4000,16000",
    depths: Annotated[
        str, typer.Option(metavar="P,P,P", rich_help_panel=_FACTS, help="Where the facts stand, in percent.")
    ] = "5,30,50,70,90",
    per_depth: Annotated[
        int, typer.Option("--per-depth", metavar="N", min=1, rich_help_panel=_FACTS, help="Facts at each depth.")
    ] = 2,
    absent: Annotated[
        int,
        typer.Option(metavar="N", min=0, rich_help_panel=_FACTS, help="Questions more, about what is not there."),
    ] = 5,
    kinds: Annotated[
        str, typer.Option(metavar="A,B", rich_help_panel=_FACTS, help="Kinds of facts: number, name, place, date.")
    ] = "number,name,place,date",
    seed: Annotated[int, typer.Option(metavar="N", rich_help_panel=_FACTS, help="Other facts for another seed.")] = 0,
    task: Annotated[
        str | None,
        typer.Option(metavar="longeval|kv|babi", rich_help_panel="Task", help="Ask what a task's file asks instead."),
    ] = None,
    items: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel="Task", help="So many items of the file.")
    ] = 20,
    haystack: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", rich_help_panel="Task", help="Lose the items in this text; repeatable."),
    ] = None,
    machine: Annotated[ModelOptions, Without("weights", "device_map")],
    policy: Annotated[
        str,
        typer.Option(
            metavar="A,B,C",
            rich_help_panel="Cache",
            help="`answer` (reads again), `full` (all of the text, where it fits), and policies as in compare.",
        ),
    ] = "answer,streamh2o,h2o,streamingllm,full",
    cache: opt.Cache = 1024,
    chunk: opt.Chunk = 256,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            parser=folder("--out"),
            rich_help_panel="Output",
            help="Where the picture and finished cells go.",
        ),
    ] = Path("results/needle"),
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE|-", rich_help_panel="Output", help="Everything as one JSON object."),
    ] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Hide facts in a text and see which methods find them: a needle in a haystack.

    For each length, made-up facts are planted at each depth of the text, and all of them are asked about in one pass.
    `answer` is what `streamh2o answer` does. A policy streams the text and is asked at its end, from what its cache has
    kept. The table counts right answers, how often one of the passages shown is the planted sentence, and how often a
    question that the text does not answer is not answered.

    Instead of made-up facts, --task takes LongEval's lines, the UUID pairs of Lost in the Middle, or bAbI 1.

    DIR then holds needle.png (a heat map), needle.json, and a file per finished cell, which is not run again.

    \b
    Examples:
      streamh2o needle book.txt
      streamh2o needle 'books/*.txt' --lengths 60000,1000000 --policy answer --kinds number,name
      streamh2o needle longeval.jsonl --task longeval --items 10 --policy answer,full
      streamh2o needle babi.txt --task babi --haystack book.txt --lengths 16000
    """
    from streamh2o.ask.needle.facts import require_kinds
    from streamh2o.ask.needle.methods import make_methods
    from streamh2o.ask.needle.tasks import read_items
    from streamh2o.runs.outputs import check_outputs, make_folder

    check_outputs({"--json": json}, [*inputs, *(haystack or []), machine.model])
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: this is a file; name a folder.")
    methods = make_methods(listed(policy, "--policy"), cache)
    tokens, percents = numbers(lengths, "--lengths"), numbers(depths, "--depths")
    if max(percents) > 100:
        raise UsageError(f"--depths {depths}: a depth is a percentage, at most 100.")
    texts: _Facts | _Task
    if task is None:
        if haystack:
            raise UsageError("--haystack: only goes with --task; without it the INPUT is the haystack.")
        wanted = listed(kinds, "--kinds")
        require_kinds(wanted)
        texts = _Facts(inputs, tokens, [percent / 100 for percent in percents], per_depth, absent, wanted, seed)
    else:
        if len(inputs) != 1:
            raise UsageError(f"--task {task}: takes one file as INPUT, not {len(inputs)}.")
        texts = _Task(read_items(Path(inputs[0]), task, items), haystack or [], tokens)
    make_folder(out)
    raise typer.Exit(_run(texts, methods, machine.load(), chunk, out, json, quiet))


@dataclass(frozen=True)
class _Facts:
    """Made-up facts, planted in the inputs."""

    inputs: list[str]
    lengths: list[int]
    depths: list[float]
    per_depth: int
    absent: int
    kinds: list[str]
    seed: int

    def trials(self, tokenizer: Any) -> list[Trial]:
        from streamh2o.ask.needle.trials import cut, fact_trials
        from streamh2o.text.sources import open_inputs

        texts = cut(open_inputs(self.inputs), tokenizer, self.lengths)
        return list(
            fact_trials(
                texts,
                self.lengths,
                self.depths,
                per_depth=self.per_depth,
                absent=self.absent,
                kinds=self.kinds,
                seed=self.seed,
            )
        )


@dataclass(frozen=True)
class _Task:
    """The items of a task's file, lost in the texts of `haystack` if there are any."""

    items: list[Item]
    haystack: list[str]
    lengths: list[int]

    def trials(self, tokenizer: Any) -> list[Trial]:
        from streamh2o.ask.needle.trials import cut, task_trials
        from streamh2o.text.sources import open_inputs

        if not self.haystack:
            return list(task_trials(self.items))
        texts = cut(open_inputs(self.haystack), tokenizer, self.lengths)
        pairs = zip(texts, self.lengths, strict=True)
        return [trial for text, length in pairs for trial in task_trials(self.items, text, length)]


def _run(
    texts: _Facts | _Task,
    methods: list[Method],
    loaded: Loaded,
    chunk: int,
    out: Path,
    json: Path | None,
    quiet: bool,
) -> int:
    """Every trial by every method, then the results; returns the exit code."""
    from streamh2o.ask.needle.evaluate import evaluate, plan
    from streamh2o.report.live import make_display
    from streamh2o.runs.interrupt import Interrupt
    from streamh2o.runs.options import RunOptions

    finished: list[NeedleCell] = []
    failure: UserError | None = None
    with make_display(quiet) as display, Interrupt() as interrupt:
        for note in notes_on_missing({"matplotlib": "needle.png"}):
            display.note(note)
        with interrupt.waiting():
            wanted, too_long = plan(loaded, texts.trials(loaded.tokenizer), methods)
        for label, length in dict.fromkeys((method.label, trial.length) for trial, method in too_long):
            display.note(f"{label}: {length:,} tokens are more than the model can hold, so it is left out.")
        try:
            for cell in evaluate(
                loaded,
                wanted,
                out,
                RunOptions(chunk=chunk),
                interrupt=interrupt,
                observer=display,
                begin=display.begin,
            ):
                finished.append(cell)
                if interrupt.requested:
                    break
        except UserError as error:
            failure = error
    complete = len(finished) == len(wanted)
    if finished:
        _report(finished, complete, out, json, failure)
    elif failure is not None:
        raise failure
    return DONE if complete else INTERRUPTED


def _report(cells: list[NeedleCell], complete: bool, out: Path, json: Path | None, failure: UserError | None) -> None:
    """Files to `out`, the table to stdout."""
    from streamh2o.cli.results import give_results
    from streamh2o.report.needle_heat_map import plot_heat_map
    from streamh2o.report.needles import document, write_json
    from streamh2o.runs.outputs import json_lines

    files = [partial(write_json, cells, complete, out / "needle.json")]
    if installed("matplotlib"):
        files.append(partial(plot_heat_map, cells, out / "needle.png"))
    give_results(json, json_lines([document(cells, complete)]), partial(_show, cells, out), files, failure)


def _show(cells: list[NeedleCell], out: Path) -> None:
    from streamh2o.report.needles import render_needles
    from streamh2o.terminal import show
    from streamh2o.terminal_safe import visible

    show(render_needles(cells))
    print(f"\nFiles: {visible(str(out))}", flush=True)
