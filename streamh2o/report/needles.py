"""A needle evaluation as rows, a table, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.runs.outputs import write_whole
from streamh2o.terminal import count, duration, make_table, safe_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.ask.needle.evaluate import NeedleCell

HEADERS = ("method", "length", "cache", "answered", "place", "not there", "time")


@dataclass(frozen=True)
class Row:
    """All cells of one method and length. Shares are (how many, of how many); None where there are none."""

    method: str
    length: int
    cache: int
    answered: tuple[int, int] | None
    placed: tuple[int, int] | None
    found: tuple[int, int] | None
    refused: tuple[int, int] | None
    seconds: float


def rows(cells: Sequence[NeedleCell]) -> list[Row]:
    """One row for each method and length, in the order of the cells."""
    groups: dict[tuple[str, int], list[NeedleCell]] = {}
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


def render_needles(cells: Sequence[NeedleCell]) -> RenderableType:
    """A row a method and length; the best share of each length is green."""
    lines = rows(cells)
    best: dict[int, float] = {}
    for row in lines:
        if row.answered:
            best[row.length] = max(best.get(row.length, 0.0), row.answered[0] / row.answered[1])
    table = make_table(HEADERS)
    for row in lines:
        lit = bool(row.answered) and row.answered[0] / row.answered[1] == best[row.length] > 0  # type: ignore[index]
        table.add_row(*(safe_text(text, "green" if lit and n == 3 else "") for n, text in enumerate(_texts(row))))
    return table


def document(cells: Sequence[NeedleCell], complete: bool) -> dict[str, Any]:
    """What `--json` prints: a summary for each method and length, and every cell with its outcomes."""
    from dataclasses import asdict

    summary = [asdict(row) for row in rows(cells)]
    return {"schema": 1, "complete": complete, "summary": summary, "cells": [cell.to_dict() for cell in cells]}


def write_json(cells: Sequence[NeedleCell], complete: bool, path: Path) -> None:
    write_whole(path, (json.dumps(document(cells, complete), indent=1, allow_nan=False) + "\n").encode())
