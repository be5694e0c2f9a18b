from hypothesis import given
from hypothesis import strategies as st

from streamh2o.terminal_safe import visible


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
