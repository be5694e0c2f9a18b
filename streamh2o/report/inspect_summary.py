"""What the cache kept, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamh2o.report.inspect_figures import percent
from streamh2o.report.inspect_text import context_line, token_line
from streamh2o.runs.inspect.cache_contents import CacheContents, InContext
from streamh2o.terminal import count, decimal, make_facts, make_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST = 10
_ROOM = 30  # characters of context on either side


def _facts(inspection: CacheContents) -> list[tuple[str, str]]:
    """Names and values."""
    kept, held, result = inspection.kept, inspection.held, inspection.result
    parts = f"{count(kept.sinks)} sinks + {count(kept.hitters)} hitters + {count(kept.recent)} recent"
    rows = [
        ("perplexity", f"{decimal(result['ppl'])} over {count(result['scored'])} tokens"),
        ("cache", f"{result['policy']}, {count(result['cache'])} slots; now {parts}"),
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


def render_inspection(inspection: CacheContents, page: str | None) -> RenderableType:
    """Facts, and the tokens that most heads hold, each between brackets in its context. page: the page's file."""
    from rich.console import Group
    from rich.text import Text

    kept, held = inspection.kept, inspection.held
    title = inspection.name + ("" if inspection.result["complete"] else " (incomplete)")
    parts = [make_facts(title, _facts(inspection) + ([("page", page)] if page is not None else []))]
    if not inspection.most_held:
        return parts[0]
    table = make_table(("heads", "age", "most held"), left=(2,))
    table.columns[2].no_wrap, table.columns[2].overflow = True, "ellipsis"
    for each in inspection.most_held[:MOST]:
        age = kept.tokens - 1 - int(held.token[each.row])
        table.add_row(count(int(held.pairs[each.row])), count(age), _in_context(each))
    return Group(*parts, Text(""), table)


def _in_context(each: InContext) -> Text:
    """A token with what stands beside it, on one line."""
    from rich.cells import cell_len
    from rich.text import Text

    before, after = context_line(each.before)[-_ROOM:], context_line(each.after)[:_ROOM]
    space = " " * (_ROOM - cell_len(before))
    return Text.assemble((space + before, "dim"), (f"[{token_line(each.text)}]", "reverse"), (after, "dim"))
