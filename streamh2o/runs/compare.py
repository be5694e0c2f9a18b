"""Several policies and budgets on the same tokens, cell by cell, each saved when it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamh2o.errors import UsageError, UserError
from streamh2o.policies import Policy, make_policy
from streamh2o.policies.specs import policy_from_spec
from streamh2o.runs.cell_key import cell_key
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions, open_reader, open_stream
from streamh2o.runs.outputs import make_folder, write_whole
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Display
from streamh2o.terminal_safe import visible
from streamh2o.text.replay import ReadText, Replay
from streamh2o.text.sources import Source

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded

SCHEMA = 2  # of a cell's file; count it up when what a cell holds, or how it is computed, changes


@dataclass(frozen=True)
class Column:
    """One way to run every input: a policy as the user wrote it, made for one budget. cache None: all of the text."""

    label: str
    cache: int | None
    policy: Policy


@dataclass(frozen=True)
class Cell:
    """One input under one column. result: as `PerplexityRun.result`. losses: float32 [scored], nats."""

    text: ReadText
    column: Column
    result: dict[str, Any]
    losses: np.ndarray


Plan = list[tuple[ReadText, Column]]


def make_columns(specs: Sequence[str], caches: Sequence[int], sinks: int | None = None) -> list[Column]:
    """Every policy at every budget, budgets outermost; twice the same is one.

    specs, sinks: see `policy_from_spec`. Raises UsageError that names the rule broken.
    """
    columns: dict[tuple[str, int], Column] = {}
    for cache in caches:
        for spec in specs:
            columns[spec, cache] = Column(spec, cache, policy_from_spec(spec, cache, sinks))
    return list(columns.values())


def full_column(trained: int) -> Column:
    """The model, trained on so many positions, with the whole text before each token."""
    return Column("full", None, make_policy("full", cache=trained))


def check_columns(loaded: Loaded, columns: Sequence[Column], options: RunOptions) -> None:
    """Refuse what does not fit the model before hours are spent. Raises UsageError."""
    for column in columns:
        open_stream(loaded, column.policy, options).close()


def key_of(loaded: Loaded, text: ReadText, column: Column, options: RunOptions) -> str:
    """For all that a cell's losses depend on; a cell with this key need not run again."""
    parts = {
        "input": text.sha256,
        "ids": text.ids_sha256,
        "policy": column.policy.name,
        "knobs": asdict(column.policy),
        "chunk": options.chunk,
        "per_head": options.per_head,
        "evict": options.evict,
        "kv_bits": options.kv_bits,
    }
    return cell_key(SCHEMA, loaded, parts)


class Cells:
    """The finished cells in a folder: `NAME-POLICY-CACHE-KEY.json` with the result and `.npy` with the losses.

    Raises UserError where the folder cannot be made or written to, so that this shows before the first cell.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder = folder

    def _stem(self, text: ReadText, column: Column, key: str) -> str:
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(text.source.name).stem)[:40]
        return f"{name}-{column.policy.name}-{column.cache or 'all'}-{key}"

    def load(self, text: ReadText, column: Column, key: str) -> Cell | None:
        """The cell if it is there and whole; one that is damaged counts as missing and is run again."""
        path = self.folder / f"{self._stem(text, column, key)}.json"
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            losses = np.load(path.with_suffix(".npy"))
        except (OSError, ValueError, EOFError):
            return None
        if not isinstance(result, dict) or result.get("key") != key or losses.shape != (result.get("scored"),):
            return None
        return Cell(text, column, {**result, "label": column.label}, losses)

    def save(self, cell: Cell, key: str) -> None:
        """Losses first, then the result, each whole: a cell with a result has its losses."""
        path = self.folder / f"{self._stem(cell.text, cell.column, key)}.json"
        buffer = BytesIO()
        np.save(buffer, cell.losses)
        write_whole(path.with_suffix(".npy"), buffer.getvalue())
        write_whole(path, (json.dumps(cell.result, allow_nan=False, indent=1) + "\n").encode())


def plan(loaded: Loaded, texts: Sequence[ReadText], columns: Sequence[Column], against_full: bool = False) -> Plan:
    """Every text under every column, texts outermost.

    against_full: one more for every text that the model can hold, with all of the text before each token.
    """
    wanted: Plan = []
    for text in texts:
        wanted += [(text, column) for column in columns]
        if against_full and text.length <= loaded.trained_positions:
            wanted.append((text, full_column(loaded.trained_positions)))
    return wanted


@dataclass(frozen=True)
class Compared:
    """cells: those that are finished, of `wanted` many. failure: what ended the rest, if it failed."""

    cells: list[Cell]
    wanted: int
    failure: UserError | None = None

    @property
    def complete(self) -> bool:
        return len(self.cells) == self.wanted


def compare_inputs(
    loaded: Loaded,
    sources: Sequence[Source],
    columns: Sequence[Column],
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    against_full: bool = False,
    first: int = 0,
    out: Path | None = None,
    display: Display = Display(),  # noqa: B008 (holds nothing)
    interrupt: Interrupt | None = None,
) -> Compared:
    """Every one of `sources` under every one of `columns`, until the end, a failure, or `interrupt`.

    against_full, out: see `plan` and `run_cells`. first: the token from which losses will be counted. Raises UsageError
    where columns or `first` do not fit model and texts, UserError where a text cannot be read.
    """
    check_columns(loaded, columns, options)
    with interrupt.waiting() if interrupt else nullcontext():
        texts = []
        for source in sources:
            with open_reader(source, loaded.tokenizer, options) as reader:
                texts.append(ReadText.of(reader, options.chunk))
    for text in texts:
        if against_full and text.length > loaded.trained_positions:
            display.note(
                f"{text.source.name}: its {text.length:,} tokens are more than the {loaded.trained_positions:,} the "
                "model was trained on, so there is no full-context loss; lower --max-tokens for one."
            )
        if text.tokens <= first:
            raise UsageError(f"--from {first}: {text.source.name} gives {text.tokens} tokens only; lower it.")
    wanted = plan(loaded, texts, columns, against_full)
    cells: list[Cell] = []
    try:
        for cell in run_cells(loaded, wanted, out, options, display=display, interrupt=interrupt):
            cells.append(cell)
            if interrupt and interrupt.requested:
                break
    except UserError as error:
        return Compared(cells, len(wanted), error)
    return Compared(cells, len(wanted))


def run_cells(
    loaded: Loaded,
    wanted: Plan,
    out: Path | None,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    display: Display = Display(),  # noqa: B008 (holds nothing)
    interrupt: Interrupt | None = None,
) -> Iterator[Cell]:
    """The cells of `wanted` in order, each run and saved unless an earlier call has done so; ends early if interrupted.

    Texts must have been read in blocks of `options.chunk` tokens. out: its `cells` folder holds what is finished; None
    to save nothing. Raises UserError where a cell fails.
    """
    store = None if out is None else Cells(out / "cells")
    for number, (text, column) in enumerate(wanted, 1):
        key = key_of(loaded, text, column, options)
        cell = store.load(text, column, key) if store else None
        if cell is None:
            display.begin(_title(text, column), number, len(wanted))
            cell = _run(loaded, text, column, options, key, interrupt, display)
            if cell is None:
                return
            if store:
                store.save(cell, key)
        yield cell


def _title(text: ReadText, column: Column) -> str:
    budget = "the whole text" if column.cache is None else f"cache {column.cache}"
    return f"{visible(text.source.name)}, {column.label}, {budget}"


def _run(
    loaded: Loaded,
    text: ReadText,
    column: Column,
    options: RunOptions,
    key: str,
    interrupt: Interrupt | None,
    display: Display,
) -> Cell | None:
    """One cell; None where `interrupt` stopped it before its end."""
    losses: list[np.ndarray] = []
    with PerplexityRun(loaded, text.source, column.policy, options, reader=Replay(text)) as run:
        for progress in run.chunks(interrupt):
            losses.append(progress.losses)
            display(progress)
        result = run.result()
    if not result["complete"]:
        return None
    if not result["scored"]:
        raise UserError(f"{text.source.name}: holds no token to score; leave it out.")
    return Cell(text, column, {"key": key, "label": column.label, **result}, np.concatenate(losses))
