import io

import pytest
from rich.cells import cell_len

from streamh2o.terminal import as_text, decimal, duration, make_facts, make_table, show, size


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


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
    lines = as_text(make_table(("input", "ppl"), [("漢字.txt", "9.99"), ("a\tb", "1,234.50")])).splitlines()
    assert {cell_len(line) for line in lines} == {cell_len(lines[0])}
    assert "a\\tb" in lines[3]
    assert lines[2].endswith("    9.99")


def test_off_a_terminal_a_row_is_a_line_however_long_and_nothing_but_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    file = io.StringIO()
    show(make_table(("name", "ppl"), [("long name " * 900 + "[bold]:smile:", "1.00"), ("b\x1b[31m", "23.00")]), file)
    header, rule, first, second = file.getvalue().splitlines()
    assert first.endswith("[bold]:smile:   1.00")
    assert second.split() == [r"b\x1b[31m", "23.00"]
    assert "\x1b" not in file.getvalue()
    assert set(rule) == {"─"}
    assert header.split() == ["name", "ppl"]


def test_a_terminal_gets_styles_and_lines_of_its_width(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    show(make_table(("name", "ppl"), [("a" * 40, "1.00")]), file)
    assert "\x1b[1m" in file.getvalue()
    bare = file.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert max(len(line) for line in bare.splitlines()) <= 24
    assert bare.count("a") == 40 + 1, "nothing is cut"


def test_facts_stand_below_their_title_with_names_and_values_aligned():
    assert as_text(make_facts("book\x07.txt", [("tokens", "12"), ("", "34")])).splitlines() == [
        r"book\x07.txt",
        "  tokens         12",
        "                 34",
    ]
