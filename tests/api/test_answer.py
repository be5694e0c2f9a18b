"""`streamh2o.answer` gives the answers of the command."""

import json

import pytest

import streamh2o as package
from streamh2o.errors import UsageError, UserError
from tests.tiny_folder import TEXT

QUESTIONS = ["What jumps over the lazy dog?", "Who?"]
SMALL = {"cache": 448, "chunk": 64, "kernel": "torch"}


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number}. Élan! {TEXT}" for number in range(12)))
    return path


def test_the_answers_are_those_of_the_command(streamh2o, folder, book):
    got = package.answer(book, QUESTIONS, model=folder, dtype="float32", device="cpu", pin="Be brief.", **SMALL)
    line = ("--model", folder, "--dtype", "float32", "--device", "cpu", "--kernel", "torch", "--threads", 1)
    asked = [part for question in QUESTIONS for part in ("-q", question)]
    more = ("--cache", 448, "--chunk", 64, "--pin", "Be brief.", "--json", "-", "--quiet")
    code, out, _ = streamh2o("answer", book, *asked, *line, *more)
    assert code == 0
    assert got.to_dict() == json.loads(out)
    assert [each.question for each in got] == QUESTIONS
    assert got.complete
    data = book.read_bytes()
    for each in got:
        for passage in each.evidence:
            assert data[passage.start : passage.end].decode() == passage.quote


def test_a_file_its_text_and_its_pieces_are_answered_alike(loaded, book):
    text = book.read_text()
    want = package.answer(book, QUESTIONS[0], model=loaded, **SMALL)
    pieces = (text[at : at + 11] for at in range(0, len(text), 11))
    with book.open("rb") as file:
        assert package.answer(file, QUESTIONS[0], model=loaded, **SMALL) == want
    assert package.answer(text=text, questions=QUESTIONS[:1], model=loaded, **SMALL) == want
    assert package.answer(pieces, QUESTIONS[0], model=(loaded.model, loaded.tokenizer), **SMALL) == want


def test_answers_so_far_come_while_the_text_streams(loaded, book, capsys):
    heard = []
    whole = package.answer(book, "Who?", model=loaded, every=200, on_answers=heard.append, **SMALL)
    assert [each.tokens for each in heard] == sorted(each.tokens for each in heard)
    assert len(heard) > 1
    assert not any(each.complete for each in heard)
    assert heard[-1].tokens <= whole.tokens
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_if_asked_for(loaded, book, capsys, monkeypatch):
    monkeypatch.setattr("streamh2o.report.live.PlainLines.__init__.__defaults__", (0.0, lambda: 0.0))
    package.answer(book, "Who?", model=loaded, progress=True, **SMALL)
    assert "book.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"questions": []}, "takes questions"),
        ({"questions": ["Who?", "  "]}, "takes questions"),
        ({"questions": "Who?", "text": "a", "input": "b.txt"}, "text="),
        ({"questions": "Who?"}, "text="),
        ({"questions": "Who?", "text": "a", "every": 5}, "on_answers"),
        ({"questions": "Who?", "text": "a", "cache": 20}, "--cache 20 is too small"),
        ({"questions": "Who?", "text": "a", "errors": "perhaps"}, "errors"),
    ],
)
def test_what_cannot_work_is_a_usage_error(loaded, how, words):
    with pytest.raises(UsageError, match=words):
        package.answer(model=loaded, **{**SMALL, **how})


def test_an_empty_text_is_refused(loaded):
    with pytest.raises(UserError, match="nothing was read"):
        package.answer(text="", questions="Who?", model=loaded, **SMALL)
