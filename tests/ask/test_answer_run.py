"""Finding again and reading again, with small random models: what must hold whatever the model knows."""

import gzip
import io

import pytest

from streamh2o.ask.answer import Answer
from streamh2o.ask.answer_run import answer_questions
from streamh2o.runs.options import RunOptions
from streamh2o.text.sources import Source, open_inputs
from tests.tiny_folder import TEXT

QUESTIONS = ["What jumps over the lazy dog?", "Who?", "How many times better is it, they say?"]
FACT = "The pass code of the Marlow archive is 48213."


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text with CR LF, letters of several bytes, and one sentence that is unlike the rest."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    lines = [f"{number}. {TEXT}".replace("\n", "\r\n") for number in range(30)]
    lines[17] += f"Élan vital, naïve café! {FACT}\r\n"
    path.write_bytes("".join(lines).encode())
    return path


def test_evidence_is_what_stands_at_its_offsets(loaded, book):
    options = RunOptions(chunk=64)
    answers = answer_questions(loaded, open_inputs([book])[0], QUESTIONS, cache=448, options=options)
    data = book.read_bytes()
    assert answers.complete
    assert [each.question for each in answers] == QUESTIONS
    for each in answers:
        assert 0 <= each.confidence <= 1
        assert each.found == (each.confidence >= 0.5)
        assert 1 <= len(each.evidence) <= 3
        for passage in each.evidence:
            assert data[passage.start : passage.end].decode() == passage.quote
            assert passage.line == data[: passage.start].count(b"\n") + 1


@pytest.mark.parametrize("how", ["pipe", "gz"])
def test_a_pipe_and_a_compressed_file_give_what_the_file_gives(loaded, book, tmp_path, how):
    options = RunOptions(chunk=64)
    if how == "pipe":
        source = Source("stdin", None, lambda: io.BytesIO(book.read_bytes()))
    else:
        (tmp_path / "book.gz").write_bytes(gzip.compress(book.read_bytes()))
        source = open_inputs([tmp_path / "book.gz"])[0]
    want = answer_questions(loaded, open_inputs([book])[0], QUESTIONS[:1], cache=448, options=options)
    assert answer_questions(loaded, source, QUESTIONS[:1], cache=448, options=options) == want


def test_reading_stops_at_max_tokens_and_evidence_lies_before(loaded, book):
    options = RunOptions(chunk=64, max_tokens=200)
    answers = answer_questions(loaded, open_inputs([book])[0], QUESTIONS[:1], cache=448, options=options)
    text = book.read_bytes().decode()  # one byte a character there
    places = loaded.tokenizer(text, return_offsets_mapping=True).offset_mapping
    assert max(each.end for each in answers.answers[0].evidence) <= places[199][1] < len(text) / 2


def test_a_text_of_white_space_answers_nothing(loaded, tmp_path):
    (tmp_path / "blank.txt").write_bytes(b" \r\n" * 50)
    answers = answer_questions(
        loaded, open_inputs([tmp_path / "blank.txt"])[0], QUESTIONS[:1], cache=448, options=RunOptions(chunk=64)
    )
    assert answers.complete
    assert answers.answers == (Answer(QUESTIONS[0], "", 0.0, False, ()),)


def test_a_byte_order_mark_is_no_part_of_a_quote_but_counts_in_offsets(loaded, tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + FACT.encode())
    answers = answer_questions(
        loaded, open_inputs([tmp_path / "bom.txt"])[0], QUESTIONS[:1], cache=448, options=RunOptions(chunk=64)
    )
    (passage,) = answers.answers[0].evidence
    assert (passage.start, passage.end, passage.quote) == (3, 3 + len(FACT), FACT)
