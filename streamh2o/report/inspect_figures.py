"""Pictures of what the cache kept, as inline SVG that takes its colours from the page it stands in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from streamh2o.runs.inspect.kept import Kept
from streamh2o.terminal import count

LEVELS = 10  # classes k1 to k10 of the page's style, faint to strong
_WIDTH, _LEFT, _RIGHT = 1000, 52, 14  # units of the pictures
_BINS = 120
_STRONGEST = 0.98  # of the cells with hitters, the quantile that the strongest colour stands for
_MOST_ROWS = 160  # of ages, a row each head; beyond that a row each layer


def percent(share: float) -> str:
    """A share from 0 to 1 with two digits that tell: 34 %, 2.1 %, 0.034 %."""
    value = 100 * share
    digits = 0 if value >= 10 or value == 0 else min(6, 1 - math.floor(math.log10(value)))
    return f"{value:.{digits}f} %"


def level(share: float) -> int:
    """The class of a share from 0 to 1: 0 for nothing, else 1 to LEVELS."""
    return 0 if share <= 0 else max(1, min(LEVELS, math.ceil(share * LEVELS)))


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`; of wide ranges the powers alone."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


def positions(kept: Kept) -> str:
    """Layers by position in the text: which share of the tokens there each layer's heads hold."""
    oldest = int(kept.index.min())
    first = 0 if oldest * 4 < kept.tokens else int(ticks(0, oldest, 20)[-1])
    edges, counts = kept.positions(first, _BINS)
    shares = counts.sum(axis=1) / (kept.heads * np.diff(edges))  # [layers, bins]
    top = float(np.quantile(shares[shares > 0], _STRONGEST))
    row = max(5.0, min(14.0, 420 / kept.layers))
    strip = 26 if first else 0
    bottom = strip + row * kept.layers
    scale = _Scale(first, kept.tokens)
    parts = [_strip(kept, first)] if first else []
    for layer in range(kept.layers):
        for number in np.flatnonzero(shares[layer]).tolist():
            a, b = int(edges[number]), int(edges[number + 1])
            share = float(shares[layer, number])
            x, width = scale.x(a), scale.x(b) - scale.x(a)
            parts.append(
                f'<rect class="k{level(share / top)}" x="{x:.1f}" y="{strip + row * layer:.1f}" width="{width:.1f}" '
                f'height="{row:.1f}"><title>layer {layer}, tokens {count(a)}–{count(b - 1)}: '
                f"{percent(share)} held</title></rect>"
            )
    recent = scale.x(max(first, kept.tokens - kept.recent))
    parts.append(
        f'<rect class="window" x="{recent:.1f}" y="{strip}" width="{_WIDTH - _RIGHT - recent:.1f}" '
        f'height="{bottom - strip:.1f}"><title>the recent window, held by every head</title></rect>'
    )
    parts.append(f'<line class="mark" x1="{recent:.1f}" x2="{recent:.1f}" y1="{strip}" y2="{bottom:.1f}"/>')
    parts += _layer_labels(kept.layers, row, strip)
    parts += _axis(scale, ticks(first, kept.tokens), bottom, "token of the text")
    words = f"Strongest colour: {percent(top)} or more of a layer's (head, token) pairs."
    if first:
        words += f" The lower part begins at token {count(first)}; none before it is held."
    words += " Behind the broken line lies the recent window, which every head holds."
    return _figure(parts, bottom + 40, "Where hitters come from, by layer", words)


def _strip(kept: Kept, first: int) -> str:
    """The whole text as one row, with the part that the rows below show."""
    edges, counts = kept.positions(0, _BINS)
    shares = counts.sum(axis=(0, 1)) / (kept.pairs * np.diff(edges))
    scale, top = _Scale(0, kept.tokens), float(shares.max())
    x = scale.x(first)
    parts = [f'<rect class="frame" x="{_LEFT}" y="1" width="{_WIDTH - _LEFT - _RIGHT}" height="10"/>']
    for number in np.flatnonzero(shares).tolist():
        a, b = int(edges[number]), int(edges[number + 1])
        parts.append(
            f'<rect class="k{level(float(shares[number]) / top)}" x="{scale.x(a):.1f}" y="1" '
            f'width="{scale.x(b) - scale.x(a):.1f}" height="10"><title>tokens {count(a)}–{count(b - 1)}: '
            f"{percent(float(shares[number]))} held</title></rect>"
        )
    parts.append(f'<path class="zoom" d="M{x:.1f} 12L{_LEFT} 25M{_WIDTH - _RIGHT} 12V25"/>')
    parts.append(f'<text class="lab" x="{_LEFT - 6}" y="10" text-anchor="end">text</text>')
    return "".join(parts)


def ages(kept: Kept) -> str:
    """A row each head: the ages of its hitters as a line (5 to 95 %), a bar (25 to 75 %) and a dot (median)."""
    by_head = kept.pairs <= _MOST_ROWS
    quantiles = kept.age_quantiles("head" if by_head else "layer")
    assert quantiles is not None
    rows = quantiles.reshape(kept.layers, -1, quantiles.shape[-1])
    low, high = max(1.0, float(rows.min())), max(2.0, float(rows.max()))
    scale = _Scale(low / 1.05, high * 1.05, log=high > 8 * low)
    height = max(3.0, min(9.0, 420 / rows[..., 0].size))
    row = height * rows.shape[1] + 3
    parts = [
        f'<line class="grid" x1="{scale.x(at):.1f}" x2="{scale.x(at):.1f}" y1="0" y2="{row * kept.layers:.1f}"/>'
        for at in scale.ticks()
    ]
    for layer, heads in enumerate(rows.tolist()):
        for head, five in enumerate(heads):
            y = row * layer + height * (head + 0.5)
            least, low_quarter, middle, high_quarter, most = (scale.x(max(1.0, age)) for age in five)
            name = f"layer {layer}, head {head}" if by_head else f"layer {layer}"
            five_ages = " · ".join(count(round(age)) for age in five)
            parts.append(
                f"<g><title>{name}: ages {five_ages} (5, 25, 50, 75, 95 %)</title>"
                f'<rect class="hit" x="{least:.1f}" y="{y - height / 2:.1f}" width="{max(1, most - least):.1f}" '
                f'height="{height:.1f}"/>'
                f'<line class="thin" x1="{least:.1f}" x2="{most:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<line class="bar" x1="{low_quarter:.1f}" x2="{high_quarter:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke-width="{height * 0.6:.1f}"/>'
                f'<circle class="dot" cx="{middle:.1f}" cy="{y:.1f}" r="{max(1.4, height * 0.4):.1f}"/></g>'
            )
    parts += _layer_labels(kept.layers, row, 0)
    parts += _axis(scale, scale.ticks(), row * kept.layers, "age: tokens read since")
    each = "Each head" if by_head else "Each layer"
    words = f"{each} of a row: the line spans 5 to 95 % of its hitters, the bar 25 to 75 %, the dot is the median."
    return _figure(parts, row * kept.layers + 40, "How old hitters are, by layer", words)


def survival(kept: Kept) -> str:
    """Two curves over age: which share of all tokens is held, and which share of hitters an eviction leaves."""
    found = kept.survival
    known = found.could > 0
    if not known.any():
        return ""
    edges = np.maximum(found.edges, 1)
    at = np.sqrt(edges[:-1]) * np.sqrt(edges[1:])
    share = found.held.sum(axis=0)[known] / (found.could[known] * kept.pairs)
    lines = [(f"layer {number}", at[known], each[known]) for number, each in enumerate(found.held_share)]
    held = _curve(
        "Still held, by age", "of all tokens of the text", [*lines, ("all layers", at[known], share)], of_all=False
    )
    seen = found.before > 0
    if not seen.any():
        return f'<div class="pair">{held}</div>'
    mean = percent(found.stay_mean or 0)
    stays = _curve(
        "Left in place by an eviction, by age",
        f"of the hitters before it; {mean} over all ages",
        [("all layers", at[seen], found.stay_share[seen])],
        of_all=True,
    )
    return f'<div class="pair">{held}{stays}</div>'


def _curve(title: str, words: str, lines: Sequence[tuple[str, np.ndarray, np.ndarray]], of_all: bool) -> str:
    """Shares over age on a logarithmic axis; the last line is drawn bold, with a dot a value."""
    width, height = 480, 190
    ages = np.concatenate([x for _, x, _ in lines])
    scale = _Scale(float(ages.min()) / 1.1, float(ages.max()) * 1.1, log=True, width=width)
    top = 1.0 if of_all else max(1e-9, max(float(y.max()) for _, _, y in lines))

    def y_of(share: float) -> float:
        return 6 + (height - 6) * (1 - share / top)

    parts = []
    for tick in ticks(0, top, 5):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="lab" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent(tick)}</text>')
    for number, (name, xs, ys) in enumerate(lines):
        bold = number == len(lines) - 1
        points = [(scale.x(float(x)), y_of(float(y))) for x, y in zip(xs, ys, strict=True)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="{"bold" if bold else "faint"}" d="{path}"><title>{name}</title></path>')
        if bold:
            parts += [
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>age about {count(round(age))}: '
                f"{percent(float(share))}</title></circle>"
                for (x, y), age, share in zip(points, xs.tolist(), ys.tolist(), strict=True)
            ]
    parts += _axis(scale, scale.ticks(), height, "age: tokens read since", width)
    return _figure(parts, height + 40, title, words, width)


class _Scale:
    """From values to the horizontal place in a picture."""

    def __init__(self, low: float, high: float, log: bool = False, width: int = _WIDTH) -> None:
        self.low, self.high, self.log, self.width = low, max(high, low + 1e-9), log, width

    def x(self, value: float) -> float:
        a, b, v = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return _LEFT + (v - a) / (b - a) * (self.width - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def _axis(scale: _Scale, values: Sequence[float], y: float, name: str, width: int = _WIDTH) -> list[str]:
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>']
    for value in values:
        x = scale.x(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}"/>')
        anchor = "end" if x > width - _RIGHT - 16 else "middle"
        parts.append(
            f'<text class="lab" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="{anchor}">{count(round(value))}</text>'
        )
    parts.append(
        f'<text class="lab" x="{(_LEFT + width - _RIGHT) / 2}" y="{y + 32:.1f}" text-anchor="middle">{name}</text>'
    )
    return parts


def _layer_labels(layers: int, row: float, top: float) -> list[str]:
    """Layer numbers, as many as there is room for, and what they are."""
    every = max(1, math.ceil(14 / row))
    parts = [
        f'<text class="lab" x="{_LEFT - 6}" y="{top + row * (layer + 0.5) + 4:.1f}" text-anchor="end">{layer}</text>'
        for layer in range(0, layers, every)
    ]
    middle = top + row * layers / 2
    parts.append(
        f'<text class="lab" transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">layer</text>'
    )
    return parts


def _figure(parts: Sequence[str], height: float, title: str, words: str, width: int = _WIDTH) -> str:
    return (
        f'<figure><figcaption><b>{title}</b> {words}</figcaption><svg viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg></figure>'
    )
