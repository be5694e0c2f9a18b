"""A comparison as tables: one for each input, and one of means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamh2o.report.comparison import REFERENCE, blocks
from streamh2o.terminal import count, decimal, make_table, safe_text, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADERS = ("policy", "cache", "perplexity", "to StreamingLLM", "tokens/s", "keys+values")


def render_comparison(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """`comparison.rows` as tables; the lowest perplexity of each budget is bold, the reference dim."""
    from rich.console import Group
    from rich.text import Text

    shown: list[RenderableType] = []
    for name, group in blocks(rows):
        table = make_table(_HEADERS)
        budget: Any = ""  # of the row above
        for row in group:
            style = "bold" if row["cache"] != budget else "dim" if row["policy"] == REFERENCE else ""
            table.add_row(*(safe_text(cell) for cell in _cells(row)), style=style)
            budget = row["cache"]
        shown += [Text("")] if shown else []
        shown += [safe_text(name, "bold"), table]
    return Group(*shown)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["policy"],
        "all" if row["cache"] is None else count(row["cache"]),
        decimal(row["ppl"]),
        "-" if row["change"] is None else _percent(row["change"], row["change_error"]),
        decimal(row["tokens_per_second"], 0),
        size(row["kv_bytes"]),
    )


def _percent(change: float, error: float | None) -> str:
    return f"{change:+.2f} %" + (f" ± {error:.2f}" if error else "")
