"""Pictures: perplexity over the tokens of a text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.outputs import write_whole
from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from streamh2o.runs.progress import Progress

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's colours, which the colour-blind can tell apart; their yellow is too faint for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_MOST_POINTS = 4096


@dataclass
class Curve:
    """Perplexity over tokens: one line of a picture, and an observer of `run_perplexity` that collects it.

    Memory stays flat however long the text: past 4,096 points every other one is dropped.
    """

    label: str
    tokens: list[int] = field(default_factory=list)
    ppl: list[float] = field(default_factory=list)
    window: list[float] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def __call__(self, progress: Progress) -> None:
        self.add(progress.token, progress.ppl, progress.ppl_window)

    def add(self, token: int, ppl: float | None, window: float | None) -> None:
        """The next point; one without a perplexity is left out."""
        if ppl is None or window is None:
            return
        if self._seen % self._stride == 0:
            self.tokens.append(token)
            self.ppl.append(ppl)
            self.window.append(window)
            if len(self.tokens) > _MOST_POINTS:
                for points in (self.tokens, self.ppl, self.window):
                    del points[1::2]
                self._stride *= 2
        self._seen += 1


def read_log(path: Path) -> list[Curve]:
    """The curves of a log that `--log` wrote, one for each of its inputs.

    A last line that was cut off in mid-write is left out. Raises UserError where the file is missing or no log.
    """
    curves: dict[str, Curve] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    name = line.get("input", path.stem)
                    curve = curves.setdefault(name, Curve(name))
                    curve.add(int(line["token"]), line["ppl"], line["ppl_window"])
                except (ValueError, TypeError, KeyError, AttributeError):
                    if not text.endswith("\n") and curves:
                        break
                    raise UserError(f"{path}: line {number} is not one of a log that --log wrote.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"{path}: can't be read ({reason.lower()}); name a file that --log wrote.") from None
    found = [curve for curve in curves.values() if curve.tokens]
    if not found:
        raise UserError(f"{path}: this log has no perplexity in it yet.")
    return found


def check_format(path: Path, option: str = "--plot") -> None:
    """Raises UsageError where the name's ending is not a kind of picture."""
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"{option} {path}: end the name in one of {', '.join('.' + name for name in FORMATS)}.")


def plot_curves(curves: Sequence[Curve], path: Path, title: str | None = None, window: int | None = None) -> None:
    """Draw running perplexity (bold) and windowed perplexity (thin) over tokens into `path`.

    Raises UserError where there is nothing to draw, or `path` can't be written.
    """
    check_format(path)
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        raise UserError(f"{path}: nothing was scored, so there is no picture to draw.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "streamh2o"}):
        figure, axes = pyplot.subplots(figsize=(10, 5.6), dpi=150, layout="constrained")
        try:
            for number, curve in enumerate(curves):
                colour = COLOURS[number % len(COLOURS)]
                dashes = DASHES[number // len(COLOURS) % len(DASHES)]
                axes.plot(curve.tokens, curve.window, color=colour, linewidth=0.8, alpha=0.45)
                label = _plain(f"{_short(curve.label)}: {curve.ppl[-1]:.2f}")
                (bold,) = axes.plot(curve.tokens, curve.ppl, color=colour, linewidth=2.2, linestyle=dashes, label=label)
                if len(curve.tokens) == 1:
                    bold.set_marker("o")
            _finish(axes, curves, title, window)
            picture = BytesIO()
            figure.savefig(picture, format=path.suffix.lower().lstrip("."))
        finally:
            pyplot.close(figure)
    write_whole(path, picture.getvalue())


def _finish(axes: Axes, curves: Sequence[Curve], title: str | None, window: int | None) -> None:
    if title is None:
        title = f"Perplexity of {_short(curves[0].label)}" if len(curves) == 1 else "Running perplexity"
    axes.set_title(_plain(title), loc="left", fontweight="bold", pad=24)
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
    """Where the lines live; a few wild first tokens, always too high, would flatten the rest."""
    running = [value for curve in curves for value in curve.ppl]
    settled = [value for curve in curves for value in curve.ppl[len(curve.ppl) // 20 :]]
    windowed = sorted(value for curve in curves for value in curve.window[len(curve.window) // 20 :])
    low = min(*running, windowed[len(windowed) // 50])
    high = max(*settled, windowed[-1 - len(windowed) // 50])
    margin = max((high - low) * 0.06, high * 0.005)
    if not math.isfinite(high - low):
        return 0.0, 1.0
    return max(0.0, low - margin), high + margin


def _short(label: str, most: int = 48) -> str:
    name = label.rsplit("/", 1)[-1] or label
    return name if len(name) <= most else name[: most - 1] + "…"


def _plain(text: str) -> str:
    """`text` as it is: control characters shown, no `$` taken for a formula, no leading `_` for a hidden name."""
    shown = visible(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
