"""What the cache kept, in a few lines for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamh2o.report.inspect_figures import percent
from streamh2o.report.inspect_text import context_line, token_line
from streamh2o.report.tables import count, decimal
from streamh2o.runs.inspect.inspection import InContext, Inspection
from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST = 10
_ROOM = 30  # characters of context on either side


def facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Names and values, safe to show."""
    kept, held, result = inspection.kept, inspection.held, inspection.result
    parts = f"{count(kept.sinks)} sinks + {count(kept.hitters)} hitters + {count(kept.recent)} recent"
    rows = [
        ("perplexity", f"{decimal(result['ppl'])} over {count(result['scored'])} tokens"),
        ("cache", f"{visible(result['policy'])}, {count(result['cache'])} slots; now {parts}"),
    ]
    if kept.hitters == 0:
        return [*rows, ("hitters", "none")]
    share = len(held.token) / max(1, kept.tokens)
    young, median, old = np.quantile(kept.age, [0.05, 0.5, 0.95])
    rows += [
        (
            "hitters",
            f"{count(len(held.token))} distinct tokens in {count(kept.pairs)} heads, {percent(share)} of the text",
        ),
        ("age", f"median {count(round(median))} tokens, 5 to 95 %: {count(round(young))} to {count(round(old))}"),
    ]
    if kept.survival.stay_mean is not None:
        stay = percent(kept.survival.stay_mean)
        rows.append(
            ("turnover", f"{stay} of hitters stay from one eviction to the next, {count(kept.evictions)} in all")
        )
    return rows


def line_parts(each: InContext) -> tuple[str, str, str]:
    """A token with what stands beside it, on one line, safe to show."""
    before, after = context_line(each.before), context_line(each.after)
    return before[-_ROOM:].rjust(_ROOM), token_line(each.text), after[:_ROOM]


def _head(inspection: Inspection, each: InContext) -> str:
    kept, held = inspection.kept, inspection.held
    age = kept.tokens - 1 - int(held.token[each.row])
    return f"{count(int(held.pairs[each.row])):>7}{count(age):>11}  "


def _title(inspection: Inspection) -> str:
    return visible(inspection.name) + ("" if inspection.result["complete"] else " (incomplete)")


def plain(inspection: Inspection, page: str | None) -> str:
    """For pipes and files: facts, and the most held tokens between brackets in their context."""
    lines = [_title(inspection)]
    lines += [f"  {name:<14} {value}" for name, value in facts(inspection)]
    if page is not None:
        lines.append(f"  {'page':<14} {visible(page)}")
    if inspection.most_held:
        lines += ["", f"{'heads':>7}{'age':>11}  most held"]
    for each in inspection.most_held[:MOST]:
        before, text, after = line_parts(each)
        lines.append(f"{_head(inspection, each)}{before}[{text}]{after}".rstrip())
    return "\n".join(lines) + "\n"


def rich_summary(inspection: Inspection, page: str | None) -> RenderableType:
    """The same with the tokens lit."""
    from rich.console import Group
    from rich.text import Text

    rows: list[RenderableType] = [Text(_title(inspection), style="bold")]
    named = facts(inspection) + ([("page", visible(page))] if page is not None else [])
    rows += [Text.assemble((f"  {name:<14} ", "dim"), value) for name, value in named]
    if inspection.most_held:
        rows += [Text(""), Text(f"{'heads':>7}{'age':>11}  most held", style="dim")]
    for each in inspection.most_held[:MOST]:
        before, text, after = line_parts(each)
        rows.append(
            Text.assemble(
                _head(inspection, each),
                (before, "dim"),
                (text or " ", "reverse"),
                (after, "dim"),
                no_wrap=True,
                overflow="ellipsis",
            )
        )
    return Group(*rows)
