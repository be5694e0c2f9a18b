"""A picture of perplexity over the tokens of a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamh2o.errors import UsageError, UserError
from streamh2o.extras import require_package
from streamh2o.report.picture import COLOURS, DASHES, as_it_is, picture, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from streamh2o.runs.curve import Curve

FORMATS = ("png", "svg", "pdf")


def check_format(path: Path, option: str = "--plot") -> None:
    """Raises UsageError where the name's ending is not a kind of picture, UserError where matplotlib is missing."""
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"{option} {path}: end the name in one of {', '.join('.' + name for name in FORMATS)}.")
    require_package("matplotlib", f"{option} {path}")


def plot_curves(curves: Sequence[Curve], path: Path, title: str | None = None, window: int | None = None) -> None:
    """Draw running perplexity (bold) and windowed perplexity (thin) over tokens into `path`.

    Raises UserError where there is nothing to draw, or `path` can't be written.
    """
    check_format(path)
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        raise UserError(f"{path}: nothing was scored, so there is no picture to draw.")
    with picture(path, (10, 5.6)) as figure:
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            dashes = DASHES[number // len(COLOURS) % len(DASHES)]
            axes.plot(curve.tokens, curve.window, color=colour, linewidth=0.8, alpha=0.45)
            label = as_it_is(f"{short(curve.label)}: {curve.ppl[-1]:.2f}")
            (bold,) = axes.plot(curve.tokens, curve.ppl, color=colour, linewidth=2.2, linestyle=dashes, label=label)
            if len(curve.tokens) == 1:
                bold.set_marker("o")
        _finish(axes, curves, title, window)


def _finish(axes: Axes, curves: Sequence[Curve], title: str | None, window: int | None) -> None:
    if title is None:
        title = f"Perplexity of {short(curves[0].label)}" if len(curves) == 1 else "Running perplexity"
    axes.set_title(as_it_is(title), loc="left", fontweight="bold", pad=24)
    newest = f"the newest {window:,}" if window else "the newest"
    axes.text(0, 1.02, f"bold: all tokens so far; thin: {newest}", transform=axes.transAxes, color="#444444")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity per token")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="at the end", frameon=False, alignment="left")
    axes.set_xlim(left=0)
    axes.set_ylim(*_limits(curves))


def _limits(curves: Iterable[Curve]) -> tuple[float, float]:
    """Bottom and top of the picture. The first tokens are left out, since their high values would flatten the rest."""
    running = [value for curve in curves for value in curve.ppl]
    settled = [value for curve in curves for value in curve.ppl[len(curve.ppl) // 20 :]]
    windowed = sorted(value for curve in curves for value in curve.window[len(curve.window) // 20 :])
    low = min(*running, windowed[len(windowed) // 50])
    high = max(*settled, windowed[-1 - len(windowed) // 50])
    margin = max((high - low) * 0.06, high * 0.005)
    if not math.isfinite(high - low):
        return 0.0, 1.0
    return max(0.0, low - margin), high + margin
