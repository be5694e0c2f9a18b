"""What the cache kept as one HTML page: it loads nothing, has no script, and shows a text's markup as text."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

import numpy as np

from streamh2o.report import inspect_figures as figures
from streamh2o.report.inspect_text import context_line, token_line
from streamh2o.runs.inspect.cache_contents import CacheContents, InContext
from streamh2o.runs.inspect.excerpts import Excerpt, Unit
from streamh2o.terminal import count, decimal
from streamh2o.terminal_safe import visible


def page(inspection: CacheContents) -> str:
    """The whole page. Its size is bounded by the cache and by the caps of `inspection`, not by the text."""
    name = shown(inspection.name)
    style = files("streamh2o.report").joinpath("inspect_page.css").read_text("utf-8")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}: what the cache kept</title><style>{style}</style></head><body><main>",
        f"<h1>What the cache kept <small>of {name}</small></h1>",
        _state(inspection),
        _tiles(inspection),
        _settings(inspection),
        *_pictures(inspection),
        *_table(inspection),
        *_text(inspection),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def shown(text: str) -> str:
    """Any text as HTML on one line; control characters and markup are escaped."""
    return html.escape(visible(text))


def flowing(text: str, held: bool) -> str:
    """A piece of the book as HTML; in a held one line ends can be seen."""
    text = text.replace("\r", "←").replace("\n", "↵\n") if held else text.replace("\r", "")
    # A tab moves nothing on a page.
    return html.escape("\t".join(visible(part, keep_newlines=True) for part in text.split("\t")))


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as 0–2, 5."""
    parts = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(parts)


def _state(inspection: CacheContents) -> str:
    if inspection.failure is not None:
        return f'<p class="warn">Ended early: {shown(str(inspection.failure))}</p>'
    if not inspection.result["complete"]:
        return '<p class="warn">Interrupted: this is the cache after the tokens read until then.</p>'
    return ""


def _tiles(inspection: CacheContents) -> str:
    kept, held, result = inspection.kept, inspection.held, inspection.result
    tiles = [
        (decimal(result["ppl"]), "perplexity", f"{count(result['scored'])} tokens scored"),
        (count(kept.tokens), "tokens read", f"{count(kept.evictions)} evictions"),
        (
            count(len(held.token)),
            "distinct hitters",
            f"in {count(kept.pairs)} heads of {count(kept.hitters)} slots each",
        ),
    ]
    if kept.hitters:
        median = float(np.median(kept.age))
        tiles.append((count(round(median)), "median age", "tokens read since, over all slots"))
    if kept.survival.stay_mean is not None:
        tiles.append((figures.percent(kept.survival.stay_mean), "of hitters stay", "from one eviction to the next"))
    cells = [f"<div><b>{value}</b><span>{name}</span><small>{note}</small></div>" for value, name, note in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _settings(inspection: CacheContents) -> str:
    kept, result = inspection.kept, inspection.result
    bounds = f"{count(kept.sinks)} sinks + {count(kept.hitters)} hitters + {count(kept.recent)} recent"
    facts = [
        ("policy", shown(result["policy"])),
        ("cache", f"{count(result['cache'])} slots per head = {bounds}"),
        *((knob, shown(str(result[knob]))) for knob in ("far", "decay", "positions", "reach") if knob in result),
        ("chunk", count(result["chunk"])),
        ("model", f"{shown(str(result['model']['name']))}, {kept.layers} layers of {kept.heads} KV heads"),
        ("numbers", f"{shown(result['dtype'])} on {shown(result['device'])}"),
        (
            "text",
            f"{count(result['input']['bytes'])} bytes, sha256 <code>{shown(result['input']['sha256'][:16])}…</code>",
        ),
    ]
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in facts)}</dl>"


def _pictures(inspection: CacheContents) -> Iterator[str]:
    kept = inspection.kept
    yield "<h2>Hitters</h2>"
    if kept.hitters == 0:
        why = "nothing was evicted yet" if kept.evictions == 0 else "this policy keeps none"
        yield f"<p>There are no hitters: {why}. All that the cache holds are sinks and recent tokens.</p>"
        return
    if kept.evictions == 0:
        yield "<p>Nothing was evicted yet: the tokens between sinks and recent window are all still there.</p>"
    yield figures.positions(kept)
    yield figures.ages(kept)
    yield figures.survival(kept)


def _table(inspection: CacheContents) -> Iterator[str]:
    if not inspection.most_held:
        return
    heads = "".join(f"<th>{name}</th>" for name in ("token", "age", "held by", "layers", "mean rank", "in the text"))
    yield "<h2>Most held</h2>"
    yield (
        f"<p>Tokens by the number of heads that hold them, {count(inspection.kept.pairs)} being all. Rank 1 is the "
        "slot that its head would give up last.</p>"
    )
    yield f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>'
    for each in inspection.most_held:
        yield _row(inspection, each)
    yield "</tbody></table></div>"


def _row(inspection: CacheContents, each: InContext) -> str:
    kept, held = inspection.kept, inspection.held
    token, pairs = int(held.token[each.row]), int(held.pairs[each.row])
    share = pairs / kept.pairs
    rank = "-" if held.rank is None else decimal(float(held.rank[each.row]), 1)
    layers = np.flatnonzero(held.by_layer[each.row])
    before, text, after = (
        html.escape(part)
        for part in (context_line(each.before).lstrip(), token_line(each.text), context_line(each.after))
    )
    lit = f'{before}<mark class="k{figures.level(math.sqrt(share))}">{text or "▯"}</mark>{after}'
    return (
        f"<tr><td>{count(token)}</td><td>{count(kept.tokens - 1 - token)}</td>"
        f'<td class="meter" style="--share:{100 * share:.1f}%">{pairs}</td>'
        f'<td title="{ranges(layers.tolist())}">{len(layers)}</td><td>{rank}</td>'
        f'<td class="context">{lit}</td></tr>'
    )


def _text(inspection: CacheContents) -> Iterator[str]:
    kept, excerpts = inspection.kept, inspection.excerpts
    yield "<h2>In the text</h2>"
    legend = "".join(f'<mark class="k{n}" title="{_share_of(n)}">&nbsp;</mark>' for n in range(1, figures.LEVELS + 1))
    yield (
        f'<p class="legend">Held by few {legend} to all heads; <mark class="sink">sink</mark> and '
        '<mark class="recent">recent</mark> tokens are held by all. Point at a token for its figures.</p>'
    )
    if excerpts.least > 1:
        left = int((inspection.held.pairs < excerpts.least).sum())
        yield (
            f"<p>To keep this page small, {count(left)} tokens that fewer than {count(excerpts.least)} heads hold are "
            "not marked here, and the text around them may be left out; --json has all.</p>"
        )
    yield '<div class="text">'
    end = 0
    for part in excerpts.parts:
        if part.first > end:
            yield _fold(inspection, end, part.first)
        yield f'<p id="t{part.first}">{"".join(_pieces(inspection, part))}</p>'
        end = part.stop
    if end < kept.tokens:
        yield _fold(inspection, end, kept.tokens)
    yield "</div>"


def _share_of(number: int) -> str:
    low, high = ((n / figures.LEVELS) ** 2 for n in (number - 1, number))
    return f"{figures.percent(low)} to {figures.percent(high)} of the heads"


def _fold(inspection: CacheContents, first: int, stop: int) -> str:
    """A line for tokens that are not shown."""
    kept, held = inspection.kept, inspection.held
    number = f"{count(stop - first)} token{'s' if stop - first > 1 else ''}"
    inside = int(np.searchsorted(held.token, stop) - np.searchsorted(held.token, first))
    if first >= kept.tokens - kept.recent:
        words = f"{number} of the recent window"
    elif inside:
        words = f"{number}, {count(inside)} of them held by fewer than {count(inspection.excerpts.least)} heads"
    else:
        words = f"{number}, none kept"
    return f'<div class="fold">… {words} …</div>'


class _Kind(NamedTuple):
    """How a unit is drawn: its class, and for a hitter its hover title, which keeps it apart from its neighbours."""

    css: str
    title: str = ""


def _pieces(inspection: CacheContents, part: Excerpt) -> Iterator[str]:
    """Units in order; neighbours that are drawn alike are one piece."""
    for kind, group in groupby(part.units, lambda unit: _kind(inspection, unit)):
        units = list(group)
        hitter = bool(kind.title)
        text = "".join(flowing(unit.text, held=hitter) for unit in units)
        if inspection.kept.bos and units[0].first == 0 and not text:
            text = "[BOS]"
        text = text or ("▯" if hitter else "")
        title = f' title="{kind.title}"' if hitter else ""
        yield f'<mark class="{kind.css}"{title}>{text}</mark>' if kind.css else text


def _kind(inspection: CacheContents, unit: Unit) -> _Kind:
    kept, held = inspection.kept, inspection.held
    if unit.first < kept.sinks:
        return _Kind("sink")
    if unit.stop > kept.tokens - kept.recent:
        return _Kind("recent")
    rows = np.arange(np.searchsorted(held.token, unit.first), np.searchsorted(held.token, unit.stop))
    rows = rows[held.pairs[rows] >= inspection.excerpts.least]
    if len(rows) == 0:
        return _Kind("")
    share = int(held.pairs[rows].max()) / kept.pairs
    return _Kind(f"k{figures.level(math.sqrt(share))}", "; ".join(_hover(inspection, int(row)) for row in rows))


def _hover(inspection: CacheContents, row: int) -> str:
    """A hitter's figures for its hover title."""
    kept, held = inspection.kept, inspection.held
    token = int(held.token[row])
    rank = "" if held.rank is None else f", mean rank {decimal(float(held.rank[row]), 1)} of {count(kept.hitters)}"
    layers = ranges(np.flatnonzero(held.by_layer[row]).tolist())
    return (
        f"token {count(token)}: {count(int(held.pairs[row]))} of {count(kept.pairs)} heads, "
        f"age {count(kept.tokens - 1 - token)}{rank}, layers {layers}"
    )
