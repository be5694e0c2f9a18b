"""A comparison as rows, tables, JSON and Parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.outputs import write_whole
from streamh2o.perplexity import exp
from streamh2o.report.tables import count, decimal, size, table
from streamh2o.report.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from streamh2o.compare import Cell

SCHEMA = 1
MEAN = "geometric mean"
REFERENCE = "streamingllm"  # what the others are measured against, at the same budget
_HEADERS = ("policy", "cache", "perplexity", "to StreamingLLM", "tokens/s", "keys+values")


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A flat row a cell: what Parquet holds.

    policy: as the user wrote it; knobs: its fields as JSON. cache: None for all of the text. change: perplexity against
    StreamingLLM's on the same text at the same budget, in percent, below 0 where lower; None where that is missing.
    """
    reference = {(id(c.text), c.column.cache): c.result["nll_mean"] for c in cells if c.column.label == REFERENCE}
    flat = []
    for cell in cells:
        result, policy = cell.result, cell.column.policy
        knobs = {name: result[name] for name in policy.__dataclass_fields__ if name in result and name != "cache"}
        flat.append(
            {
                "input": result["input"]["name"],
                "sha256": result["input"]["sha256"],
                "policy": cell.column.label,
                "cache": cell.column.cache,
                "knobs": json.dumps(knobs),
                "change": _change(result["nll_mean"], reference.get((id(cell.text), cell.column.cache))),
                **{name: result[name] for name in _COPIED},
                "model": result["model"]["name"],
                "fingerprint": result["model"]["fingerprint"],
                "version": result["versions"]["streamh2o"],
                "key": result["key"],
            }
        )
    return flat


_COPIED = (
    *("tokens", "scored", "nll_sum", "nll_mean", "ppl", "bits_per_byte", "ppl_word", "seconds", "tokens_per_second"),
    *("kv_bytes", "max_slots", "evictions", "chunk", "per_head", "dtype", "device", "threads"),
)


def means(flat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the inputs, for each policy and budget that has run on all of them: geometric mean of the perplexities, and
    of the changes; tokens per second of all together. Nothing where there is one input."""
    inputs = {(row["input"], row["sha256"]) for row in flat}
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in flat:
        groups.setdefault((row["policy"], row["cache"]), []).append(row)
    found = []
    for (policy, cache), group in groups.items():
        if len(inputs) < 2 or len(group) < len(inputs):
            continue
        nll = sum(row["nll_mean"] for row in group) / len(group)
        changes = [row["change"] for row in group]
        ratios = None if None in changes else sum(math.log1p(change / 100) for change in changes) / len(changes)
        seconds = sum(row["seconds"] for row in group)
        found.append(
            {
                "policy": policy,
                "cache": cache,
                "nll_mean": nll,
                "ppl": exp(nll),
                "change": None if ratios is None else 100 * math.expm1(ratios),
                "tokens_per_second": sum(row["tokens"] for row in group) / seconds if seconds else None,
                "kv_bytes": max(row["kv_bytes"] for row in group),
            }
        )
    return found


def _change(nll: float, reference: float | None) -> float | None:
    return None if reference is None else 100 * math.expm1(nll - reference)


def blocks(flat: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """What is shown together: each input's rows under its name, then the means; budgets ascending, the best first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in flat:
        groups.setdefault((row["input"], row["sha256"]), []).append(row)
    named = [(f"{name}, {count(group[0]['tokens'])} tokens", group) for (name, _), group in groups.items()]
    if averaged := means(flat):
        named.append((f"{MEAN} of {len(groups)} inputs", averaged))
    return [(name, sorted(group, key=_order)) for name, group in named]


def _order(row: dict[str, Any]) -> tuple[float, float]:
    return (math.inf if row["cache"] is None else row["cache"], row["nll_mean"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["policy"],
        "all" if row["cache"] is None else count(row["cache"]),
        decimal(row["ppl"]),
        "-" if row["change"] is None else f"{row['change']:+.2f} %",
        decimal(row["tokens_per_second"], 0),
        size(row["kv_bytes"]),
    )


def plain(flat: Sequence[dict[str, Any]]) -> str:
    """The tables as aligned text, one under another."""
    return "\n\n".join(
        f"{visible(name)}\n{table(_HEADERS, [_cells(row) for row in group])}" for name, group in blocks(flat)
    )


def rich_tables(flat: Sequence[dict[str, Any]]) -> RenderableType:
    """The same for a terminal, a rule between budgets, the lowest perplexity of each budget in bold."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = []
    for name, group in blocks(flat):
        grid = Table(title=Text(visible(name), style="bold"), title_justify="left", box=box.SIMPLE, pad_edge=False)
        for number, header in enumerate(_HEADERS):
            grid.add_column(header, justify="right" if number else "left", overflow="fold")
        for above, row in zip([None, *group], group, strict=False):
            first = above is None or above["cache"] != row["cache"]
            if first and above is not None:
                grid.add_section()
            style = "bold" if first else "dim" if row["policy"] == REFERENCE else ""
            grid.add_row(*(Text(visible(cell)) for cell in _cells(row)), style=style)
        shown.append(grid)
    return Group(*shown)


def document(cells: Sequence[Cell], complete: bool) -> dict[str, Any]:
    """What `compare.json` holds: every cell's result as `ppl --json` gives it, with the change, and the means."""
    flat = rows(cells)
    return {
        "schema": SCHEMA,
        "complete": complete,
        "reference": REFERENCE,
        "cells": [
            {**cell.result, "cache": row["cache"], "change": row["change"]}
            for cell, row in zip(cells, flat, strict=True)
        ],
        "means": means(flat),
    }


def write_json(cells: Sequence[Cell], complete: bool, path: Path) -> None:
    """Raises UserError where `path` can't be written."""
    write_whole(path, (json.dumps(document(cells, complete), allow_nan=False, indent=1) + "\n").encode())


def write_parquet(cells: Sequence[Cell], path: Path) -> None:
    """`rows` as Parquet. Raises UserError where `path` can't be written."""
    import pyarrow
    from pyarrow import parquet

    buffer = BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows(cells)), buffer)
    write_whole(path, buffer.getvalue())
