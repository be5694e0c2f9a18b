"""A needle evaluation as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.report.picture import as_it_is, picture
from streamh2o.terminal import count

if TYPE_CHECKING:
    from streamh2o.ask.needle.evaluate import NeedleCell, Outcome


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
            grid = [[float("nan")] * len(lengths) for _ in depths]
            for column, length in enumerate(lengths):
                outcomes = [o for c in cells if c.method == method and c.length == length for o in c.outcomes]
                for depth, share in accuracy(outcomes).items():
                    grid[depths.index(depth)][column] = share
            image = panel.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            panel.set_title(as_it_is(method), fontsize=9)
            panel.set_xticks(range(len(lengths)), [count(length) if length else "as it is" for length in lengths])
            panel.tick_params(axis="x", labelrotation=45, labelsize=7)
            panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        panels[0].set_ylabel("depth")
        figure.supxlabel("tokens of text", fontsize=9)
        figure.colorbar(image, ax=list(panels), label="share answered")
