"""`streamh2o answer`: its JSON, its refusals, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from transformers import GPT2Config, PreTrainedTokenizerFast

from tests.call import one_sentence
from tests.families import random_model
from tests.tiny_folder import TEXT
from tests.toy_tokenizers import gpt2

QUESTION = "What jumps over the lazy dog?"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("".join(f"{number}. {TEXT}" for number in range(30)))
    return path


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
    line = ("answer", book, "-q", QUESTION, "--model", folder, "--dtype", "float32", "--device", "cpu", "--quiet")
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
