"""A comparison as rows, JSON and Parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamh2o.runs.outputs import write_whole
from streamh2o.runs.perplexity import exp
from streamh2o.terminal import count

if TYPE_CHECKING:
    from streamh2o.runs.compare import Cell

SCHEMA = 1
MEAN = "geometric mean"
REFERENCE = "streamingllm"  # what the others are measured against, at the same budget
BLOCK, LEAST_BLOCKS = 500, 8  # losses of a block, and the fewest blocks, for a standard error


def rows(cells: Sequence[Cell], first: int = 0) -> list[dict[str, Any]]:
    """A flat row a cell: what Parquet holds.

    policy: as the user wrote it; knobs: its fields as JSON. cache: None for all of the text. change: perplexity against
    StreamingLLM's on the same text at the same budget, in percent, below 0 where lower; None without StreamingLLM.
    change_error: its standard error, in percent, from the differences of blocks of 500 tokens. first: count the losses
    from this token of the text on; the tokens before it only fill the cache.
    """
    reference = {(id(c.text), c.column.cache): c for c in cells if c.column.label == REFERENCE}
    flat = []
    for cell in cells:
        result, policy = cell.result, cell.column.policy
        losses, skipped = _counted(cell, first)
        against = reference.get((id(cell.text), cell.column.cache))
        difference = None if against is None else losses - _counted(against, first)[0]
        sums = {name: result[name] for name in _SUMS} if not skipped else _sums(losses)
        knobs = {name: result[name] for name in policy.__dataclass_fields__ if name in result and name != "cache"}
        flat.append(
            {
                "input": result["input"]["name"],
                "sha256": result["input"]["sha256"],
                "policy": cell.column.label,
                "cache": cell.column.cache,
                "knobs": json.dumps(knobs),
                "first": first,
                "change": None if difference is None else 100 * math.expm1(float(difference.mean(dtype=np.float64))),
                "change_error": None if difference is None else _standard_error(difference),
                "tokens": result["tokens"],
                **sums,
                **{name: result[name] for name in _COPIED},
                "kv_bits": result.get("kv_bits", 16),
                "model": result["model"]["name"],
                "fingerprint": result["model"]["fingerprint"],
                "version": result["versions"]["streamh2o"],
                "key": result["key"],
            }
        )
    return flat


_SUMS = ("scored", "nll_sum", "nll_mean", "ppl", "bits_per_byte", "ppl_word")
_COPIED = (
    *("seconds", "tokens_per_second", "kv_bytes", "max_slots", "evictions", "chunk", "per_head", "dtype", "device"),
    "threads",
)


def _counted(cell: Cell, first: int) -> tuple[np.ndarray, int]:
    """The losses of token `first` of the text and later ones, and how many were left out."""
    skipped = max(0, first - (cell.text.tokens - len(cell.losses)))
    return cell.losses[skipped:], skipped


def _sums(losses: np.ndarray) -> dict[str, Any]:
    """The sums that `PerplexityRun.result` has for a whole text. The bytes and words of a part are not known."""
    total = float(losses.sum(dtype=np.float64))
    mean = total / len(losses)
    return {**dict.fromkeys(_SUMS), "scored": len(losses), "nll_sum": total, "nll_mean": mean, "ppl": exp(mean)}


def _standard_error(difference: np.ndarray) -> float | None:
    """Of the mean difference, in percent, from means of blocks: single losses depend on their neighbours.

    None where there are fewer than `LEAST_BLOCKS`.
    """
    blocks = len(difference) // BLOCK
    if blocks < LEAST_BLOCKS:
        return None
    means = difference[: blocks * BLOCK].reshape(blocks, BLOCK).mean(axis=1, dtype=np.float64)
    return 100 * float(means.std(ddof=1)) / math.sqrt(blocks)


def means(flat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the inputs, for each policy and budget that has run on all of them: geometric mean of the perplexities, and
    of the changes; tokens per second over all inputs. Empty where there is one input."""
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
        errors = [row["change_error"] for row in group]
        seconds = sum(row["seconds"] for row in group)
        found.append(
            {
                "policy": policy,
                "cache": cache,
                "nll_mean": nll,
                "ppl": exp(nll),
                "change": None if ratios is None else 100 * math.expm1(ratios),
                "change_error": None if None in errors else math.hypot(*errors) / len(errors),
                "tokens_per_second": sum(row["tokens"] for row in group) / seconds if seconds else None,
                "kv_bytes": max(row["kv_bytes"] for row in group),
            }
        )
    return found


def blocks(flat: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Titles with their rows: each input, then the means. Budgets ascend; within one the lowest perplexity is first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in flat:
        groups.setdefault((row["input"], row["sha256"]), []).append(row)
    named = [(f"{name}, {_extent(group[0])}", group) for (name, _), group in groups.items()]
    if averaged := means(flat):
        named.append((f"{MEAN} of {len(groups)} inputs", averaged))
    return [(name, sorted(group, key=_order)) for name, group in named]


def _extent(row: dict[str, Any]) -> str:
    return f"{count(row['tokens'])} tokens" + (f", from token {count(row['first'])} on" if row["first"] else "")


def _order(row: dict[str, Any]) -> tuple[float, float]:
    return (math.inf if row["cache"] is None else row["cache"], row["nll_mean"])


def document(cells: Sequence[Cell], complete: bool, first: int = 0) -> dict[str, Any]:
    """What `compare.json` holds: every cell's result as `ppl --json` gives it, with the change, and the means.

    first: as in `rows`; the sums of a cell are then those of the counted losses.
    """
    flat = rows(cells, first)
    return {
        "schema": SCHEMA,
        "complete": complete,
        "reference": REFERENCE,
        "cells": [
            {**cell.result, **{name: row[name] for name in (*_SUMS, "first", "cache", "change", "change_error")}}
            for cell, row in zip(cells, flat, strict=True)
        ],
        "means": means(flat),
    }


def write_json(cells: Sequence[Cell], complete: bool, path: Path, first: int = 0) -> None:
    """Raises UserError where `path` can't be written."""
    write_whole(path, (json.dumps(document(cells, complete, first), allow_nan=False, indent=1) + "\n").encode())


def write_parquet(cells: Sequence[Cell], path: Path, first: int = 0) -> None:
    """`rows` as Parquet. Raises UserError where `path` can't be written."""
    import pyarrow
    from pyarrow import parquet

    buffer = BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows(cells, first)), buffer)
    write_whole(path, buffer.getvalue())
