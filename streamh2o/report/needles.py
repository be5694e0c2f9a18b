"""A needle evaluation as a table, a heat map, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.report.tables import count, duration, table
from streamh2o.runs.outputs import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.ask.needle.evaluate import Cell, Outcome

HEADERS = ("method", "length", "cache", "answered", "place", "not there", "time")


@dataclass(frozen=True)
class Row:
    """All cells of one method and length. Shares are (how many, of how many); None where there is nothing to tell."""

    method: str
    length: int
    cache: int
    answered: tuple[int, int] | None
    placed: tuple[int, int] | None
    found: tuple[int, int] | None
    refused: tuple[int, int] | None
    seconds: float


def rows(cells: Sequence[Cell]) -> list[Row]:
    """One row for each method and length, in the order of the cells."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.length), []).append(cell)
    result = []
    for (method, length), group in groups.items():
        outcomes = [outcome for cell in group for outcome in cell.outcomes]
        there = [each for each in outcomes if each.depth is not None]
        absent = [each for each in outcomes if each.depth is None]
        result.append(
            Row(
                method,
                length,
                group[0].cache,
                _share(each.right for each in there),
                _share(each.placed for each in there if each.placed is not None),
                _share(each.found for each in there if each.found is not None),
                _share(each.right for each in absent),
                sum(cell.seconds for cell in group),
            )
        )
    return result


def _share(values: Iterable[bool | None]) -> tuple[int, int] | None:
    values = list(values)
    return (sum(bool(each) for each in values), len(values)) if values else None


def _of(share: tuple[int, int] | None) -> str:
    return "-" if share is None else f"{share[0]} of {share[1]}"


def _texts(row: Row) -> tuple[str, ...]:
    length = count(row.length) if row.length else "as it is"
    cache = "all" if row.method == "full" else count(row.cache)
    return (
        row.method,
        length,
        cache,
        _of(row.answered),
        _of(row.placed),
        _of(row.refused),
        duration(row.seconds),
    )


def plain(cells: Sequence[Cell]) -> str:
    """For pipes and files."""
    return table(HEADERS, [_texts(row) for row in rows(cells)])


def rich_table(cells: Sequence[Cell]) -> RenderableType:
    """The same for a terminal, the best share of each length lit."""
    from rich.table import Table
    from rich.text import Text

    lines = rows(cells)
    best: dict[int, float] = {}
    for row in lines:
        if row.answered:
            best[row.length] = max(best.get(row.length, 0.0), row.answered[0] / row.answered[1])
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for number, header in enumerate(HEADERS):
        shown.add_column(header, justify="left" if number == 0 else "right")
    for row in lines:
        lit = bool(row.answered) and row.answered[0] / row.answered[1] == best[row.length] > 0  # type: ignore[index]
        shown.add_row(*(Text(text, style="green" if lit and n == 3 else "") for n, text in enumerate(_texts(row))))
    return shown


def document(cells: Sequence[Cell], complete: bool) -> dict[str, Any]:
    """What `--json` prints: a summary for each method and length, and every cell with its outcomes."""
    from dataclasses import asdict

    summary = [asdict(row) for row in rows(cells)]
    return {"schema": 1, "complete": complete, "summary": summary, "cells": [cell.json() for cell in cells]}


def write_json(cells: Sequence[Cell], complete: bool, path: Path) -> None:
    write_whole(path, (json.dumps(document(cells, complete), indent=1, allow_nan=False) + "\n").encode())


def accuracy(outcomes: Iterable[Outcome]) -> dict[float, float]:
    """The share of right answers at each depth."""
    at: dict[float, list[bool]] = {}
    for each in outcomes:
        if each.depth is not None:
            at.setdefault(each.depth, []).append(each.right)
    return {depth: sum(right) / len(right) for depth, right in sorted(at.items())}


def plot_heat_map(cells: Sequence[Cell], path: Path) -> None:
    """A panel a method: lengths from left to right, depths downwards, the share of right answers as colour."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({each.depth for cell in cells for each in cell.outcomes if each.depth is not None})
    figure = Figure(
        figsize=(1.6 + max(1.6, 0.7 * len(lengths)) * len(methods), 1.8 + 0.32 * len(depths)), layout="constrained"
    )
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    image: Any = None
    for panel, method in zip(panels, methods, strict=True):
        grid = [[float("nan")] * len(lengths) for _ in depths]
        for column, length in enumerate(lengths):
            outcomes = [o for c in cells if c.method == method and c.length == length for o in c.outcomes]
            for depth, share in accuracy(outcomes).items():
                grid[depths.index(depth)][column] = share
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        panel.set_title(method, fontsize=9)
        panel.set_xticks(range(len(lengths)), [count(length) if length else "as it is" for length in lengths])
        panel.tick_params(axis="x", labelrotation=45, labelsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    panels[0].set_ylabel("depth")
    figure.supxlabel("tokens of text", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="share answered")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
    write_whole(path, buffer.getvalue())
