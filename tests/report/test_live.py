import io

from rich.cells import cell_len
from rich.console import Console

from streamh2o.report.live import Display, LiveLines, PlainLines, frame, make_display
from tests.runs.test_growing_file import progress


def test_plain_lines_come_every_few_seconds_and_say_it_all():
    now, out = [100.0], io.StringIO()
    display = PlainLines(out, every=5, clock=lambda: now[0])
    display.begin("book\n.txt", 2, 3)
    for now[0] in (101.0, 104.9, 105.1, 106.0, 110.2):
        display(progress())
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    for part in (r"book\n.txt (2 of 3)", "25.0%", "300 tokens", "100/s", "24.50", "23.25", "4 sinks", "128 hitters"):
        assert part in lines[0]
    assert "0:09 left" in lines[0]
    assert "1.5 GB" in lines[0]


def test_a_closed_stderr_does_not_stop_the_run():
    out = io.StringIO()
    display = PlainLines(out, every=0)
    out.close()
    display.note("hello")


def test_the_live_display_draws_a_bar_and_leaves_the_cursor_on():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, legacy_windows=False)
    with LiveLines(console, every=0) as display:
        display.begin("book\x1b[2J.txt")
        display(progress())
        shown = out.getvalue()
    for part in (r"book\x1b[2J.txt", "25.0%", "0:09 left", "24.50", "last 1,000 tokens 23.25", "1.5 GB", "380 recent"):
        assert part in shown
    assert "\x1b[2J" not in out.getvalue()
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


def test_without_a_size_there_is_no_bar_and_no_time_left():
    console = Console(width=80, file=io.StringIO())
    console.print(frame("stdin", progress(fraction=None)))
    shown = console.file.getvalue()
    assert "%" not in shown
    assert "left" not in shown
    assert "300 at 100/s" in shown


def test_a_narrow_terminal_cuts_lines_instead_of_wrapping_them():
    console = Console(width=30, file=io.StringIO())
    console.print(frame("a long name of a book.txt" * 3, progress()))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 6
    assert all(cell_len(line) <= 30 for line in lines)


def test_only_a_terminal_gets_the_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert isinstance(make_display(file=terminal), LiveLines)
    assert isinstance(make_display(file=io.StringIO()), PlainLines)
    assert type(make_display(quiet=True, file=terminal)) is Display
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(file=terminal), PlainLines)
