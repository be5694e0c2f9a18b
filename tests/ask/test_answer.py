"""Finding again and reading again, with small random models: what they must do whatever the model knows."""

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, PreTrainedTokenizerFast

from streamh2o.ask.answer import Answer, Evidence
from streamh2o.ask.answer_run import answer_questions
from streamh2o.ask.passages import merged
from streamh2o.report.answers import render_answers
from streamh2o.runs.options import RunOptions
from streamh2o.terminal import as_text
from streamh2o.text.sources import Source, open_inputs
from tests.call import one_sentence
from tests.families import random_model
from tests.tiny_folder import TEXT
from tests.toy_tokenizers import gpt2

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


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=10))
def test_merged_spans_cover_the_same_bytes_apart_and_in_order(pairs):
    spans = [(start, start + length) for start, length in pairs]
    result = merged(spans)
    assert {byte for a, b in result for byte in range(a, b)} == {byte for a, b in spans for byte in range(a, b)}
    assert all(end < start for (_, end), (start, _) in pairwise(result))


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


def test_the_answers_as_json_have_the_promised_fields(streamh2o, folder, book):
    arguments = ("--model", folder, "--chunk", 64, "--cache", 448, "--dtype", "float32", "--threads", 1, "--json", "-")
    code, out, err = streamh2o("answer", "-", "-q", "Who?", *arguments, "--quiet", stdin=book.read_bytes())
    assert (code, err) == (0, "")
    (only,) = json.loads(out)["answers"]
    assert set(only) == {"question", "answer", "confidence", "found", "evidence"}
    assert {tuple(sorted(each)) for each in only["evidence"]} == {("end", "line", "quote", "score", "start")}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "no question"),
        (("-q", "  "), 2, "no question"),
        (("-q", "Who?", "--cache", "20"), 2, "--cache 20"),
        (("-q", "Who?", "--cache", "9999"), 2, "512 positions"),
        (("-q", "why " * 30, "--chunk", "64", "--cache", "510"), 2, "shorten it"),
        (("--questions", "missing.txt"), 1, "missing.txt"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(streamh2o, folder, book, arguments, code, words):
    got, out, err = streamh2o("answer", book, "--model", folder, "--dtype", "float32", "--quiet", *arguments)
    assert (got, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_model_with_learned_positions_answers_as_far_as_they_reach(streamh2o, book, tmp_path):
    config = GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=512, eos_token_id=None)
    folder = tmp_path / "gpt2"
    random_model(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=gpt2()).save_pretrained(folder)
    line = ("answer", book, "-q", QUESTIONS[0], "--model", folder, "--dtype", "float32", "--device", "cpu", "--quiet")
    line += ("--cache", 440, "--chunk", 64, "--threads", 1, "--json", "-")
    code, out, err = streamh2o(*line, "--max-tokens", 400)
    assert (code, err) == (0, "")
    (only,) = json.loads(out)["answers"]
    assert only["evidence"]
    code, _, err = streamh2o(*line, "--max-tokens", 505)
    assert code == 1
    fitting = re.search(r"use --max-tokens (\d+)", one_sentence(err))
    assert fitting is not None
    assert streamh2o(*line, "--max-tokens", fitting[1])[0] == 0


def test_a_question_whose_bytes_are_not_utf_8_is_asked_all_the_same(streamh2o, folder, book):
    line = ("--model", folder, "--dtype", "float32", "--cache", 460, "--chunk", 64, "--max-tokens", 200, "--json", "-")
    code, out, _ = streamh2o("answer", book, "-q", "caf\udce9?", *line)
    assert code == 0
    assert json.loads(out)["answers"][0]["question"] == "caf\udce9?"


def test_an_empty_text_is_said_to_be_empty(streamh2o, folder, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    code, _, err = streamh2o(
        "answer", tmp_path / "empty.txt", "-q", "Who?", "--model", folder, "--cache", 448, "--chunk", 64, "--quiet"
    )
    assert code == 1
    assert "nothing was read" in err


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


def test_a_signal_while_a_pipe_is_read_leaves_no_file(folder, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "streamh2o.cli.main", "answer", "-", "-q", "Who?", "--model", folder, "--quiet"]
    options = ["--chunk", "32", "--cache", "448", "--dtype", "float32", "--threads", "1", "--json", "-"]
    with subprocess.Popen(
        [*command, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as process:
        assert process.stdin is not None
        process.stdin.write(TEXT.encode() * 900)  # more than a pipe holds: written means that reading has begun
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        process.stdin = None
        process.communicate(timeout=120)
        assert process.returncode == 130
    assert [each.name for each in temporary.iterdir() if each.name.startswith("streamh2o-")] == []
    assert tempfile.gettempdir() != str(temporary)


def test_what_is_shown_cannot_drive_the_terminal():
    from rich.console import Console

    quote = "first\nit was \x1b[31m48213\u202e here"
    answers = [Answer("Who\x07?", "48213\x1b[2J", 0.75, True, (Evidence(0, 5, 3, quote, 1.0),))]
    console = Console(file=io.StringIO(), width=200)
    console.print(render_answers(answers))
    for shown in (as_text(render_answers(answers)), console.file.getvalue()):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\x07" not in shown
        assert "line 3: first it was \\x1b[31m48213\\u202e here" in shown
