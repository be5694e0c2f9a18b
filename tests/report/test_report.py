import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamh2o.errors import UsageError, UserError
from streamh2o.report.live import Display, LiveLines, PlainLines, frame, make_display
from streamh2o.report.plots import Curve, plot_curves, read_log
from streamh2o.report.tables import decimal, duration, size, summary, table, width
from streamh2o.terminal_safe import visible
from tests.runs.test_outputs import progress

RESULT = {
    "input": {"name": "book.txt", "bytes": 4000, "words": 800},
    "model": {"name": "smollm2-135m"},
    "policy": "h2o",
    "cache": 512,
    "sinks": 4,
    "hitters": 254,
    "recent": 254,
    "dtype": "bfloat16",
    "device": "cpu",
    "tokens": 1201,
    "scored": 1200,
    "bos": False,
    "nll_sum": 3600.0,
    "nll_mean": 3.0,
    "ppl": 20.0855,
    "bits_per_byte": 1.2984,
    "ppl_word": 90.017,
    "seconds": 61.0,
    "tokens_per_second": 19.7,
    "peak_rss_bytes": 900_000_000,
    "kv_bytes": 11_796_480,
    "max_slots": 512,
    "evictions": 4,
    "complete": True,
}


@given(st.text())
def test_visible_text_has_nothing_that_a_terminal_obeys(text):
    shown = visible(text)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u2028\u2066\u200f" for c in shown)
    shown.encode("utf-8")
    if text.isascii() and text.isprintable():
        assert shown == text


def test_escape_sequences_are_shown_not_obeyed():
    assert visible("a\x1b[31mb\r\n\x9b2J") == r"a\x1b[31mb\r\n\x9b2J"
    assert visible("a\nb\x07", keep_newlines=True) == "a\nb\\x07"
    assert visible("caf\u00e9 漢字 👩\u200d👧") == "caf\u00e9 漢字 👩\u200d👧"
    assert visible("bad\udce9.txt") == r"bad\udce9.txt"


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (23_592_960, "23.6 MB"), (None, "-")],
)
def test_sizes_are_in_the_largest_fitting_unit(number, shown):
    assert size(number) == shown


def test_a_huge_perplexity_does_not_fill_the_line():
    assert decimal(1234.5) == "1,234.50"
    assert decimal(2.7858e26) == "2.786e+26"


@pytest.mark.parametrize(("seconds", "shown"), [(7.2, "0:07"), (59.7, "1:00"), (3661, "1:01:01"), (-1, "0:00")])
def test_durations_are_clock_like(seconds, shown):
    assert duration(seconds) == shown


def test_columns_line_up_even_with_wide_characters():
    lines = table(("input", "ppl"), [("漢字.txt", "9.99"), ("a\tb", "1,234.50")]).splitlines()
    assert {width(line) for line in lines} == {width(lines[0])}
    assert "a\\tb" in lines[3]


def test_the_summary_of_one_input_names_the_counts_behind_every_number():
    text = summary([RESULT])
    for part in ("book.txt", "1,201 (1,200 scored, no BOS)", "20.09 per token", "90.02 per word", "4,000 bytes"):
        assert part in text
    assert "incomplete" not in text
    assert "book.txt (incomplete)" in summary([RESULT | {"complete": False}])
    assert " bits, " not in text
    assert "keys and values at 4 bits, " in summary([RESULT | {"kv_bits": 4}])


def test_the_summary_of_nothing_scored_has_dashes():
    nothing = {"ppl": None, "ppl_word": None, "bits_per_byte": None, "nll_mean": None, "tokens_per_second": None}
    assert "- per token, - per word" in summary([RESULT | nothing])


def test_several_inputs_get_a_row_each():
    rows = summary([RESULT, RESULT | {"input": {"name": "b\x1b.txt"}}]).splitlines()
    assert rows[2].split()[:3] == ["book.txt", "1,201", "20.09"]
    assert rows[3].startswith(r"b\x1b.txt")


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
    assert all(width(line) <= 30 for line in lines)


def test_only_a_terminal_gets_the_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert isinstance(make_display(file=terminal), LiveLines)
    assert isinstance(make_display(file=io.StringIO()), PlainLines)
    assert type(make_display(quiet=True, file=terminal)) is Display
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(file=terminal), PlainLines)


def test_a_curve_of_a_million_points_stays_small_and_keeps_its_shape():
    curve = Curve("long")
    for token in range(1_000_000):
        curve.add(token, float(token), 1.0)
    assert 1000 < len(curve.tokens) <= 4097
    steps = {b - a for a, b in zip(curve.tokens, curve.tokens[1:], strict=False)}
    assert len(steps) == 1
    assert curve.tokens == [int(p) for p in curve.ppl]


def log_line(token: int, **extra) -> str:
    return json.dumps({"token": token, "ppl": 20.0, "ppl_window": 19.0} | extra) + "\n"


def test_a_log_gives_a_curve_for_each_of_its_inputs(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(log_line(1, input="a") + log_line(2, input="a") + log_line(1, input="b"))
    assert [(curve.label, curve.tokens) for curve in read_log(path)] == [("a", [1, 2]), ("b", [1])]


def test_a_line_cut_off_at_the_end_of_a_log_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(log_line(1) + log_line(2)[:-9])
    assert read_log(path)[0].tokens == [1]
    path.write_text(log_line(1)[:-9] + "\n" + log_line(2))
    with pytest.raises(UserError, match="line 1"):
        read_log(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b"\xff\xfe", b"[1]\n", b'{"token": 1, "ppl": null, "ppl_window": null}\n']
)
def test_what_is_no_log_is_one_sentence(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.jsonl"):
        read_log(path)
    with pytest.raises(UserError, match="no such file"):
        read_log(tmp_path / "missing")


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_picture_is_written_in_the_kind_that_its_name_says(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    curves = [Curve(f"_b${n}$\x1b", [100, 200], [30.0, 25.0], [30.0, 20.0]) for n in range(9)]
    plot_curves(curves, path, title="50 $ and _")
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    if kind == "svg":
        svg = path.read_text()
        for part in ("tokens read", "perplexity per token", "_b$8$\\x1b: 25.00", "50 $ and _"):
            assert part in svg


def test_one_point_makes_a_picture_too(tmp_path):
    plot_curves([Curve("short", [5], [30.0], [30.0])], tmp_path / "a.png")


def test_a_picture_of_nothing_or_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing was scored"):
        plot_curves([Curve("empty")], tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        plot_curves([Curve("a", [1], [1.0], [1.0])], tmp_path / "a.gif")
