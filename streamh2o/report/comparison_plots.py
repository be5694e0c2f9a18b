"""Pictures of a comparison: running perplexity over tokens, and perplexity over budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamh2o.report.comparison import REFERENCE, blocks, rows
from streamh2o.report.picture import COLOURS, DASHES, as_it_is, picture, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from streamh2o.runs.compare import Cell
    from streamh2o.text.replay import ReadText

_MARKERS = "osD^vPX"
_POINTS = 400  # of a curve
_TITLE = 44  # characters that fit above a panel
_SETTLED = 0.1  # the part of a text after which a running perplexity sets the scale
_LINE = 0.17  # inches between two labels


def plot_running(cells: Sequence[Cell], path: Path) -> None:
    """A panel for each text and budget: perplexity of all tokens so far over tokens read, a line for each policy.

    Below each the same against StreamingLLM's, in percent, since the lines themselves lie close together. The panels of
    a text share their scales. Raises UserError where `path` can't be written.
    """
    texts = list({id(cell.text): cell.text for cell in cells}.values())
    caches = sorted({cell.column.cache for cell in cells if cell.column.cache is not None})
    styles = _styles(cell.column.label for cell in cells)
    panels: list[Any] = list(caches) or [None]
    referenced = any(cell.column.label == REFERENCE for cell in cells)
    heights = [3.2, 2.2] if referenced else [3.2]
    with _panels(path, heights * len(texts), len(panels)) as grid:
        for number, text in enumerate(texts):
            own = {cache: _curves(cells, text, cache) for cache in panels}
            for row in range(len(heights)):
                drawn = {cache: curves if row == 0 else _against(curves) for cache, curves in own.items()}
                _draw_running(grid[number * len(heights) + row], text, drawn, styles, difference=row == 1)
        _name_axes(grid, "tokens read", "")


def _curves(cells: Sequence[Cell], text: ReadText, cache: int | None) -> dict[str, np.ndarray]:
    """Running perplexity of each policy on `text` at `cache`; that of the whole text belongs to every cache."""
    return {
        cell.column.label: _running(cell) for cell in cells if cell.text is text and cell.column.cache in (cache, None)
    }


def _against(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in percent of StreamingLLM's; nothing where that is missing."""
    if REFERENCE not in curves:
        return {}
    return {label: 100 * (curve / curves[REFERENCE] - 1) for label, curve in curves.items()}


def _draw_running(
    line: Sequence[Axes],
    text: ReadText,
    drawn: dict[Any, dict[str, np.ndarray]],
    styles: dict[str, dict[str, Any]],
    difference: bool,
) -> None:
    every = [curve for curves in drawn.values() for curve in curves.values()]
    if not every:
        for axes in line:
            axes.set_visible(False)
        return
    settled = [curve[int(len(curve) * _SETTLED) :] for curve in every]
    limits = _limits([float(v) for part in settled for v in (part.min(), part.max())], [c[-1] for c in every])
    for (cache, curves), axes in zip(drawn.items(), line, strict=True):
        labels = []
        for label, curve in curves.items():
            axes.plot(_places(text, len(curve)), curve, **_without(styles[label], "marker"))
            end = (
                "" if difference and label == REFERENCE else f"{curve[-1]:+.2f} %" if difference else f"{curve[-1]:.2f}"
            )
            labels.append((float(curve[-1]), f"{label} {end}".rstrip(), styles[label]["color"]))
        place = "" if cache is None else f", cache {cache:,}"
        title = "" if difference else short(text.source.name, _TITLE - len(place)) + place
        _dress(axes, title, limits, labels)
        axes.set_xlim(0, text.tokens)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.locator_params(axis="x", nbins=4)
    line[0].set_ylabel("to StreamingLLM, %" if difference else "perplexity so far")


def plot_budget(cells: Sequence[Cell], path: Path, first: int = 0) -> None:
    """Perplexity over cache size, as in the lower Figure 5 of arXiv 2306.14048: a panel for each text, and one for the
    geometric mean of several. StreamingLLM is the dashed reference; the model with all of the text is a dotted line.

    first: count the losses from this token on. Raises UserError where `path` can't be written.
    """
    shown = blocks(rows(cells, first))
    styles = _styles(cell.column.label for cell in cells)
    caches = sorted({cell.column.cache for cell in cells if cell.column.cache is not None})
    across = min(3, len(shown))
    with _panels(path, [4.2] * math.ceil(len(shown) / across), across) as grid:
        every = [axes for line in grid for axes in line]
        for axes in every[len(shown) :]:
            axes.set_visible(False)
        for (name, group), axes in zip(shown, every, strict=False):
            _draw_budgets(axes, name, group, styles, caches)
        _name_axes(grid, "cache, slots per layer and head", "perplexity")


def _draw_budgets(
    axes: Axes, name: str, group: Sequence[dict[str, Any]], styles: dict[str, dict[str, Any]], caches: Sequence[int]
) -> None:
    limits = _limits([row["ppl"] for row in group], [row["ppl"] for row in group])
    labels = []
    for policy in dict.fromkeys(row["policy"] for row in group if row["cache"] is not None):
        line = sorted((row["cache"], row["ppl"]) for row in group if row["policy"] == policy and row["cache"])
        style = styles[policy]
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, marker=style["marker"], markersize=6, **_without(style, "marker"))
        labels.append((ys[-1], f"{policy} {ys[-1]:.2f}", style["color"]))
    for row in group:
        if row["cache"] is None:
            axes.axhline(row["ppl"], **_without(styles[row["policy"]], "marker"))
            labels.append((row["ppl"], f"{row['policy']} {row['ppl']:.2f}", styles[row["policy"]]["color"]))
    _dress(axes, short(name, _TITLE), limits, labels)
    axes.set_xscale("log", base=2)
    axes.set_xticks(caches, [f"{cache:,}" for cache in caches])
    axes.minorticks_off()
    if caches:
        axes.set_xlim(caches[0] / 1.12, caches[-1] * 1.04 if len(caches) > 1 else caches[-1] * 1.12)


def _places(text: ReadText, points: int) -> np.ndarray:
    """Tokens read at so many evenly spaced points of a text, the last one its end."""
    scored = text.length - 1
    return np.linspace(1, scored, points).round() + (text.tokens - scored)


def _running(cell: Cell) -> np.ndarray:
    """The perplexity of all tokens so far, at `_POINTS` places or at each token of a shorter text."""
    scored = len(cell.losses)
    at = np.linspace(1, scored, min(scored, _POINTS)).round().astype(int)
    mean = np.cumsum(cell.losses, dtype=np.float64)[at - 1] / at
    return np.exp(np.minimum(mean, 700.0))


def _styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, dashes and marker of each policy, the same in all panels; the references are black and grey."""
    styles: dict[str, dict[str, Any]] = {
        REFERENCE: {"color": "#000000", "linestyle": (0, (4, 2)), "linewidth": 2.0, "marker": "o"},
        "full": {"color": "#777777", "linestyle": (0, (1, 1.5)), "linewidth": 2.0, "marker": "o"},
    }
    colours = COLOURS[:-1]
    for number, label in enumerate(label for label in dict.fromkeys(labels) if label not in styles):
        styles[label] = {
            "color": colours[number % len(colours)],
            "linestyle": DASHES[number // len(colours) % len(DASHES)],
            "linewidth": 2.0,
            "marker": _MARKERS[number % len(_MARKERS)],
        }
    return styles


def _without(style: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in style.items() if key != name}


def _limits(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """Bottom and top of a panel. A line that ends far above the others leaves the panel; it would flatten the rest."""
    middle, low = sorted(ends)[len(ends) // 2], min(values)
    highest = middle + max(0.35 * abs(middle), 3 * (middle - low))
    high = max(value for value in (*values, middle) if value <= highest)
    margin = max(0.06 * (high - low), 0.002 * abs(high), 1e-6)
    return low - margin, high + margin


def _dress(axes: Axes, title: str, limits: tuple[float, float], labels: Sequence[tuple[float, str, str]]) -> None:
    """Title, scale, grid, and beside each line's end its name and value, moved apart where they would overlap."""
    axes.set_title(as_it_is(title), loc="left", fontsize=11, fontweight="bold")
    axes.set_ylim(*limits)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = limits
    placed = sorted(((value - low) / (high - low), text, colour) for value, text, colour in labels)
    gap = _LINE * axes.figure.dpi / axes.bbox.height
    heights = _spread([min(1.0, height) for height, _, _ in placed], gap)
    for (height, text, colour), y in zip(placed, heights, strict=True):
        note = f"{as_it_is(text)} ↑" if height > 1 else as_it_is(text)
        axes.annotate(
            note,
            xy=(1.0, min(1.0, height)),
            xytext=(1.05, y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending `heights`, moved apart until neighbours are `gap` apart and all are at most 1."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = 1.0
    for number in range(len(placed) - 1, -1, -1):
        placed[number] = min(placed[number], ceiling)
        ceiling = placed[number] - gap
    return placed


@contextmanager
def _panels(path: Path, heights: Sequence[float], across: int) -> Iterator[Any]:
    """Axes in rows of these heights, in inches, and so many columns; drawn into `path` at the end."""
    with picture(path, (1.2 + 4.6 * across, 0.4 + sum(heights)), dpi=130) as figure:
        yield figure.subplots(len(heights), across, squeeze=False, gridspec_kw={"height_ratios": list(heights)})


def _name_axes(grid: Any, below: str, left: str) -> None:
    if left:
        for line in grid:
            line[0].set_ylabel(left)
    for axes in grid[-1]:
        axes.set_xlabel(below)
