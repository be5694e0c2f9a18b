"""What people read on a terminal or in a pipe: numbers, tables, and printing them. rich is imported only to print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from streamh2o.terminal_safe import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_NO_LIMIT = 10**9  # columns of a file, so that nothing is wrapped or cut


def count(number: int | None) -> str:
    """1234567 as 1,234,567; "-" for None."""
    return "-" if number is None else f"{number:,}"


def decimal(number: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point, or as 2.786e+26 where that would be a long one; "-" for None."""
    if number is None:
        return "-"
    return f"{number:,.{digits}f}" if abs(number) < 1e9 else f"{number:.3e}"


def size(number: int | None) -> str:
    """Bytes in the largest unit that leaves a number of at least one, 1 kB being 1,000 bytes; "-" for None."""
    if number is None:
        return "-"
    if number < 1000:
        return f"{number} B"
    scaled = float(number)
    for unit in ("kB", "MB", "GB", "TB"):
        scaled /= 1000
        if scaled < 999.95 or unit == "TB":
            break
    return f"{scaled:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def safe_text(text: str, style: str = "") -> Text:
    """Text of any origin as one that rich prints as it is: no markup, and nothing that a terminal would obey."""
    from rich.text import Text

    return Text(visible(text), style=style)


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]] = (), left: Sequence[int] = (0,)) -> Table:
    """A table with a line under its headers. Columns are numbers, aligned at the right, but for those in `left`.

    Cells may hold any text. Longer tables add their rows themselves: `add_row` with `safe_text`, `add_section`.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        table.add_column(safe_text(header), justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(safe_text(cell) for cell in row))
    return table


def make_facts(title: str, facts: Iterable[tuple[str, str]]) -> RenderableType:
    """A title, and below it a line each for names and values, which may hold any text."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=14, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(safe_text(name, "dim"), safe_text(value))
    return Group(safe_text(title, "bold"), Padding(grid, (0, 0, 0, 2), expand=False))


def show(what: RenderableType, file: TextIO | None = None) -> None:
    """Print to `file` (stdout): styled and fitted to its width on a terminal, as `as_text` elsewhere."""
    file = file or sys.stdout
    if file.isatty():
        _console(file).print(what)
    else:
        file.write(as_text(what))
    file.flush()


def as_text(what: RenderableType) -> str:
    """Plain text without colours, one row a line however long, for pipes and files."""
    from io import StringIO

    buffer = StringIO()
    _console(buffer, width=_NO_LIMIT, color_system=None, force_terminal=False, force_jupyter=False).print(what)
    return "".join(f"{line.rstrip(' ')}\n" for line in buffer.getvalue().split("\n")[:-1])


def _console(file: TextIO, **how: object) -> Console:
    from rich.console import Console

    return Console(file=file, markup=False, emoji=False, highlight=False, **how)  # type: ignore[arg-type]
