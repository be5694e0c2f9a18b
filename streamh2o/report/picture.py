"""What all pictures share: figures that need no display, colours, and labels that are drawn as they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamh2o.extras import require_package
from streamh2o.runs.outputs import write_whole
from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; their yellow is too faint for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_STYLE: dict[str, Any] = {"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": "streamh2o"}


@contextmanager
def picture(path: Path, inches: tuple[float, float], dpi: int = 150) -> Iterator[Figure]:
    """An empty figure to draw on. At the end Agg draws it into `path`, in the format of the name's ending.

    pyplot and the choice of a backend are left to the user's own program. Raises UserError where `path` can't be
    written, and where matplotlib is not installed.
    """
    require_package("matplotlib", str(path))
    matplotlib = _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        drawn = BytesIO()
        figure.savefig(drawn, format=path.suffix.lower().lstrip("."))
    write_whole(path, drawn.getvalue())


def short(label: str, most: int = 48) -> str:
    """The name of a file without its folder, of at most so many characters."""
    name = label.rsplit("/", 1)[-1] or label
    return name if len(name) <= most else name[: most - 1] + "…"


def as_it_is(text: str) -> str:
    """`text` for matplotlib: control characters shown, no `$` for a formula, no leading `_` for a hidden name."""
    shown = visible(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _import_matplotlib() -> Any:
    """matplotlib, also where MPLBACKEND names a backend that is not installed, with which a plain import would fail.

    Jupyter sets MPLBACKEND for all it starts. Where its backend is there, later plots of the user's own still get it.
    """
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    named = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
    if named:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = named
    return matplotlib
