"""What `generate` writes to a terminal and to its transcript, and the turns of a chat that it reads."""

import io

from streamh2o.cli.generate_io import TextOutput, turns
from streamh2o.runs.generate.transcript import Transcript


def test_control_sequences_reach_a_file_but_not_a_terminal(monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    with Transcript(tmp_path / "t.txt") as file:
        TextOutput(file, shown=True).write("a\x1b[2Jb\tc\n")
    assert screen.getvalue() == "a\\x1b[2Jb\tc\n"
    assert (tmp_path / "t.txt").read_text() == "a\x1b[2Jb\tc\n"


def test_turns_are_lines_with_words_and_stand_in_the_transcript(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n  \n caf\udce9? \n"))
    with Transcript(tmp_path / "t.txt") as file:
        said = list(TextOutput(file, shown=True).with_turns(turns()))
    assert said == ["Hello", "caf\ufffd?"]
    assert (tmp_path / "t.txt").read_text() == "> Hello\n\n> caf\ufffd?\n\n"
    assert capsys.readouterr().out == ""
