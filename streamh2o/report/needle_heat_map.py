"""A needle evaluation as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.report.picture import as_it_is, picture
from streamh2o.terminal import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from streamh2o.ask.needle.evaluate import NeedleCell, Outcome

_LIGHT = 0.6  # a share from which on its colour is light


def accuracy(outcomes: Iterable[Outcome]) -> dict[float, float]:
    """The share of right answers at each depth."""
    at: dict[float, list[bool]] = {}
    for each in outcomes:
        if each.depth is not None:
            at.setdefault(each.depth, []).append(each.right)
    return {depth: sum(right) / len(right) for depth, right in sorted(at.items())}


def plot_heat_map(cells: Sequence[NeedleCell], path: Path) -> None:
    """A panel a method: lengths from left to right, depths downwards, the share of right answers as colour."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({each.depth for cell in cells for each in cell.outcomes if each.depth is not None})
    inches = (1.6 + max(1.6, 0.7 * len(lengths)) * len(methods), 1.8 + 0.32 * len(depths))
    with picture(path, inches) as figure:
        panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
        image: Any = None
        for panel, method in zip(panels, methods, strict=True):
            image = _draw(panel, [cell for cell in cells if cell.method == method], lengths, depths)
            panel.set_title(as_it_is(method), fontsize=9)
        panels[0].set_ylabel("depth", fontsize=9)
        figure.supxlabel("tokens of text", fontsize=9)
        bar = figure.colorbar(image, ax=list(panels), format=lambda share, _: f"{share:.0%}")
        bar.set_label("share answered", fontsize=9)
        bar.ax.tick_params(labelsize=7)


def _draw(panel: Axes, cells: Sequence[NeedleCell], lengths: Sequence[int], depths: Sequence[float]) -> AxesImage:
    """One method's shares, as colours and numbers; where nothing was asked the panel stays white."""
    grid = [[float("nan")] * len(lengths) for _ in depths]
    for column, length in enumerate(lengths):
        outcomes = [outcome for cell in cells if cell.length == length for outcome in cell.outcomes]
        for depth, share in accuracy(outcomes).items():
            row = depths.index(depth)
            grid[row][column] = share
            colour = "white" if share < _LIGHT else "black"
            panel.text(column, row, f"{share:.0%}", color=colour, fontsize=7, ha="center", va="center")
    panel.set_xticks(range(len(lengths)), [count(length) if length else "as it is" for length in lengths])
    panel.tick_params(axis="x", labelrotation=45, labelsize=7)
    panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    return panel.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
