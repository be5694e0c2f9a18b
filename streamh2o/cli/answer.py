"""`streamh2o answer`: questions about a text of any length."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import CheckpointOptions, ModelOptions, check_checkpoint
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.cli.values import at_least
from streamh2o.errors import DONE, INTERRUPTED, UsageError

if TYPE_CHECKING:
    from streamh2o.ask.answer import Answers
    from streamh2o.ask.extract import Field
    from streamh2o.models.loaded import Loaded
    from streamh2o.report.live import Display
    from streamh2o.runs.options import RunOptions
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.text.sources import Source

app = make_app()
_MOST_QUESTIONS = 1000


@app.command(cls=ManualCommand)
@expand_groups
def answer(
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="A file (.gz and .xz too), - for stdin, or hf:DATASET[:CONFIG]:SPLIT[:COLUMN].",
        ),
    ],
    *,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", metavar="TEXT", rich_help_panel="Questions", help="A question; repeatable."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions", metavar="FILE", rich_help_panel="Questions", help="A file with a question on each line."
        ),
    ] = None,
    extract: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=WHAT|FILE",
            rich_help_panel="Questions",
            help="Fill a record as JSON: a field and what it is, or a file of such lines; repeatable.",
        ),
    ] = None,
    pin: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            rich_help_panel="Questions",
            show_default=False,
            help="An instruction that stays in the sinks, and before what is read again.",
        ),
    ] = "",
    machine: Annotated[ModelOptions, Without("device_map")],
    cache: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel="Cache", help="Most tokens that the model looks back at, at any time."
        ),
    ] = 1024,
    chunk: Annotated[
        int,
        typer.Option(
            metavar="N",
            callback=at_least("--chunk", 1),
            rich_help_panel="Cache",
            help="Tokens of a pass; questions follow every second.",
        ),
    ] = 256,
    reading: Annotated[opt.ReadOptions, Without("newline", "allow_special")],
    every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            rich_help_panel="Output",
            help="Give the best answers so far after each N tokens too, for a pipe without end.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE|-", rich_help_panel="Output", help="The answers as one JSON object."),
    ] = None,
    quiet: opt.Quiet = False,
    saving: CheckpointOptions,
) -> None:
    """Answer questions about a text of any length, and show where in the text each answer stands.

    The text streams through the model once, whatever the number of questions. After every second chunk the model is
    asked how likely each question has become; where it is likeliest, and where rare words of the question stand, the
    sentences are read again, and answered from. The text of a pipe is kept in a private temporary file meanwhile, which
    goes away with the command, also on Ctrl-C.

    Each answer comes with a confidence from 0 to 1, and up to three passages of the text. Below one half, the answer
    counts as not found. --json gives the passages as byte offsets into the input (decompressed), the end not included.

    --extract asks what fills a record: its JSON holds the record, with null for what is not found, and each field with
    its evidence. With --every, --json - prints one JSON object a line, with `token` saying after how many.

    Ctrl-C ends the reading and answers from what was read; a second Ctrl-C quits at once.

    With --checkpoint DIR the reading is saved once a minute, and when it is stopped; the same command with --resume
    then goes on to the same answers.

    \b
    Examples:
      streamh2o answer book.txt -q "Who painted the ceiling of the chapel?"
      streamh2o answer book.txt --questions questions.txt --json answers.json
      zcat mail.gz | streamh2o answer - -q "What is the order number?" -q "When does the ship leave?"
      streamh2o answer contract.txt --extract "tenant=the name of the tenant" --extract "rent=the monthly rent"
      tail -f log.txt | streamh2o answer - -q "Which disk failed?" --every 5000
    """
    from streamh2o.ask.extract import read_fields
    from streamh2o.cli.results import give_results
    from streamh2o.runs.outputs import check_outputs, is_stdout
    from streamh2o.text.sources import open_inputs

    fields = read_fields(extract) if extract else []
    if fields and (question or questions):
        raise UsageError("--extract: its fields are the questions; leave -q and --questions out.")
    asked = [field.question for field in fields] or _questions(question or [], questions)
    sources = open_inputs([input])
    if len(sources) != 1:
        raise UsageError(f"{input}: {len(sources)} files match, and answers come from one text; name one.")
    check_outputs({"--json": json}, [sources[0].name, machine.model, *([str(questions)] if questions else [])])

    from contextlib import nullcontext

    from streamh2o.report.live import make_display
    from streamh2o.runs.options import RunOptions

    options = RunOptions(chunk, **asdict(reading))
    plan = _Plan(sources[0], asked, cache, pin, every, options, json)
    report = _Report(fields, to_stdout=is_stdout(json))
    display = make_display(quiet)
    keeper = saving.open(display.note)
    with keeper or nullcontext():
        if keeper is not None:
            machine = check_checkpoint(machine, keeper, sources, plan.described(), {})
        if keeper is not None and keeper.finished:
            display.note(f"{saving.checkpoint}: this run had come to its end; these are its answers.")
            answers = plan.answered(keeper)
        else:
            answers = _run(plan, machine.load(), display, report, keeper)
    give_results(json, report.document(answers), lambda: report.show(answers))
    raise typer.Exit(DONE if answers.complete else INTERRUPTED)


@dataclass(frozen=True)
class _Plan:
    source: Source
    questions: list[str]
    cache: int
    pin: str
    every: int | None
    options: RunOptions
    json: Path | None

    def described(self) -> dict[str, Any]:
        """Every option that the answers depend on."""
        return {**asdict(self.options), "cache": self.cache, "pin": self.pin, "question": self.questions}

    def answered(self, keeper: Keeper) -> Answers:
        """The answers of a finished run."""
        from streamh2o.ask.answer import Answer, Answers
        from streamh2o.runs.saving.checks import naming_damage

        with naming_damage(self.source.name):
            result = keeper.results[0]
            return Answers(tuple(Answer.of(each) for each in result["answers"]), result["tokens"], True)


def _run(plan: _Plan, loaded: Loaded, display: Display, report: _Report, keeper: Keeper | None) -> Answers:
    from streamh2o.ask.answer_run import answer_questions
    from streamh2o.runs.interrupt import Interrupt

    with Interrupt() as interrupt, display:
        display.begin(plan.source.name)
        answers = answer_questions(
            loaded,
            plan.source,
            plan.questions,
            cache=plan.cache,
            options=plan.options,
            pin=plan.pin,
            every=plan.every,
            so_far=report.so_far,
            observers=[display],
            interrupt=interrupt,
            streamed=display.end,
            saved=keeper.state if keeper else None,
            keep=keeper.keep if keeper else lambda *_: None,
        )
        if not answers.complete:
            display.note(f"{plan.source.name}: stopped before its end; the answers are from what was read.")
        if keeper is not None and answers.complete:
            keeper.done({"tokens": answers.tokens, **answers.to_dict()}, stopping=False, last=True)
        elif keeper is not None and (where := keeper.where()):
            display.note(where)
    return answers


def _questions(given: list[str], file: Path | None) -> list[str]:
    from streamh2o.errors import UserError

    asked = list(given)
    if file is not None:
        try:
            asked += file.read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise UserError(f"--questions {file}: can't be read ({(error.strerror or str(error)).lower()}).") from None
        except UnicodeDecodeError:
            raise UserError(f"--questions {file}: is not UTF-8; convert it first.") from None
    asked = [each.strip() for each in asked if each.strip()]
    if not asked:
        raise UsageError("There is no question; ask with -q, or name a file with a question on each line: --questions.")
    if len(asked) > _MOST_QUESTIONS:
        raise UsageError(
            f"There are {len(asked)} questions, and at most {_MOST_QUESTIONS} go into one pass; split them."
        )
    return asked


class _Report:
    """Answers to stdout, as text or as JSON; a record where there are fields."""

    def __init__(self, fields: list[Field], to_stdout: bool) -> None:
        self._fields, self._json = fields, to_stdout

    def document(self, answers: Answers, so_far: bool = False) -> str:
        """One line of JSON. so_far: the text has not ended yet, so it says after how many tokens."""
        import json

        from streamh2o.ask.extract import record

        entries: dict[str, Any] = {"token": answers.tokens} if so_far else {}
        entries |= record(self._fields, answers.answers) if self._fields else answers.to_dict()
        return json.dumps(entries, allow_nan=False) + "\n"

    def so_far(self, answers: Answers) -> None:
        if self._json:
            print(self.document(answers, so_far=True), end="", flush=True)
        else:
            print(f"After {answers.tokens:,} tokens:")
            self.show(answers)
            print(flush=True)

    def show(self, answers: Answers) -> None:
        from streamh2o.report.answers import render_answers
        from streamh2o.terminal import show

        show(render_answers(answers.answers, [field.name for field in self._fields]))
