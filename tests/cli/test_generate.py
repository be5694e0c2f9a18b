"""`streamh2o generate`: a text or a chat, its transcript and its result."""

import json
import os
import signal
import subprocess
import sys

import pytest

from streamh2o.errors import UserError
from streamh2o.models.load import load_model
from streamh2o.runs.generate.chat import Chat
from tests.call import one_sentence
from tests.chat_tokenizer import chat_tokenizer
from tests.tiny_folder import TEXT, make_folder


def run(streamh2o, folder, *arguments, stdin=None):
    model = ("--model", folder, "--cache", 64, "--chunk", 16, "--dtype", "float32", "--threads", 1)
    return streamh2o("generate", *model, *arguments, stdin=stdin)


def test_a_model_without_a_template_cannot_chat(streamh2o, folder):
    code, _, err = run(streamh2o, folder, "--chat", stdin=b"Hello\n")
    assert code == 1
    assert "no chat template" in one_sentence(err)
    with pytest.raises(UserError, match="leaves out"):
        broken = chat_tokenizer()
        broken.chat_template = "hello"
        Chat(broken)


def test_a_text_is_continued_and_reported(streamh2o, folder, tmp_path):
    book, transcript, result = (tmp_path / name for name in ("book.txt", "transcript.txt", "result.json"))
    book.write_text(TEXT * 20)
    arguments = ("--max-new-tokens", 100, "--seed", 3, "--transcript", transcript, "--json", result)
    code, out, err = run(streamh2o, folder, book, *arguments)
    assert code == 0
    assert out == transcript.read_text("utf-8") != ""
    assert "100 tokens" in err
    assert "at most 80 slots" in err
    figures = json.loads(result.read_text())
    assert figures["new_tokens"] == 100
    assert figures["prompt_tokens"] == len(load_model(folder).tokenizer(TEXT * 20).input_ids)
    assert figures["max_slots"] <= 64 + 16
    assert (figures["stopped"], figures["complete"], figures["sampling"]["seed"]) == ("max-new-tokens", True, 3)
    code, again, _ = run(streamh2o, folder, "-", *arguments[:4], "--quiet", stdin=book.read_bytes())
    assert (code, again) == (0, out)
    code, only, _ = run(streamh2o, folder, "--prompt", TEXT, "--max-new-tokens", 5, "--json", "-", *arguments[4:6])
    assert json.loads(only)["new_tokens"] == 5


def test_a_chat_takes_a_turn_a_line_and_keeps_a_transcript(streamh2o, tmp_path):
    folder = make_folder(tmp_path / "chat")
    chat_tokenizer().save_pretrained(folder)
    transcript, result = tmp_path / "talk.txt", tmp_path / "talk.json"
    code, out, _ = run(
        *(streamh2o, str(folder), "--chat", "--system", "Be kind.", "--max-new-tokens", 6, "--seed", 1, "--cache", 256),
        *("--transcript", transcript, "--json", result),
        stdin="Hello\n\n  \nWho jumps \u00e9?\n".encode(),
    )
    assert code == 0
    text = transcript.read_text("utf-8")
    assert text.startswith("> Hello\n\n")
    assert "> Who jumps \u00e9?\n\n" in text
    answers = text.replace("> Hello\n\n", "").replace("> Who jumps \u00e9?\n\n", "")
    assert out == answers
    assert json.loads(result.read_text())["new_tokens"] <= 12


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "Name one text"),
        (("--prompt", "a", "b.txt"), 2, "Name one text"),
        (("--chat", "--prompt", "a"), 2, "--chat takes no text"),
        (("--system", "a", "--prompt", "b"), 2, "--system belongs to a chat"),
        (("--prompt", "a", "--json", "-"), 2, "--transcript"),
        (("--prompt", "a", "--top-p", "1.5"), 2, "--top-p"),
        (("--prompt", "a", "--temperature", "-1"), 2, "--temperature"),
        (("--prompt", "a", "--greedy", "--temperature", "0.5"), 2, "leave one of them out"),
        (("--prompt", "a", "--chunk", "0"), 2, "it must be at least 1"),
        (("--prompt", "a", "--sinks", "-1"), 2, "--sinks is -1; it must be at least 0"),
        (("--prompt", "a", "--policy", "recompute"), 2, "recompute"),
        (("--prompt", ""), 1, "is empty"),
        (("missing.txt",), 1, "missing.txt"),
        (("--prompt", "a", "--transcript", "no/such/folder.txt"), 2, "no folder"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(streamh2o, folder, arguments, code, words):
    got, out, err = run(streamh2o, folder, *arguments, "--quiet")
    assert (got, out) == (code, "")
    assert words in one_sentence(err)


def test_ctrl_c_ends_an_endless_text_with_its_transcript(folder, tmp_path):
    transcript, result = tmp_path / "t.txt", tmp_path / "r.json"
    command = [sys.executable, "-m", "streamh2o.cli.main", "generate", "--prompt", TEXT, "--model", folder]
    options = ["--max-new-tokens", "0", "--cache", "64", "--chunk", "16", "--dtype", "float32", "--threads", "1"]
    with subprocess.Popen(
        [*command, *options, "--transcript", str(transcript), "--json", str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # else `read` takes more than it gives, which `communicate` then misses
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as process:
        assert process.stdout is not None
        seen = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 130
    assert transcript.read_bytes() == seen + rest
    figures = json.loads(result.read_text())
    assert (figures["stopped"], figures["complete"]) == ("interrupted", False)
