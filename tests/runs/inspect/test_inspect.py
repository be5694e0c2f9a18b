"""The command `streamh2o inspect`."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from streamh2o.cli.inspect import _page_name
from tests.call import call_streamh2o, one_sentence
from tests.report.test_inspect_page import Page
from tests.tiny_folder import TEXT, make_book, make_folder

SMALL = ("--cache", 48, "--chunk", 32, "--dtype", "float32", "--device", "cpu", "--threads", 1)


@pytest.fixture
def streamh2o(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return call_streamh2o(capsys, monkeypatch)


def test_the_command_writes_page_and_json_and_tells_the_rest(streamh2o, folder, tmp_path):
    book = make_book(tmp_path)
    code, out, err = streamh2o("inspect", book, "--model", folder, *SMALL, "--json", "all.json", "--quiet")
    assert (code, err) == (0, "")
    assert "book.inspect.html" in out
    Page((tmp_path / "book.inspect.html").read_text("utf-8"))
    document = json.loads((tmp_path / "all.json").read_text())
    kept = document["kept"]
    assert (document["schema"], document["complete"], document["tokens"]) == (1, True, 228)
    index = np.array(kept["index"])
    assert index.shape == (kept["layers"], kept["kv_heads"], kept["hitters"]) == (2, 2, 22)
    assert {each["token"]: each["pairs"] for each in kept["tokens"]} == {
        token: int((index == token).sum()) for token in np.unique(index).tolist()
    }
    data = book.read_bytes().decode()
    assert all(data.startswith(each["text"], each["byte"]) for each in kept["tokens"])
    assert f"{len(kept['tokens'])} distinct tokens" in out
    plain_ppl = streamh2o("ppl", book, "--model", folder, *SMALL, "--json", "-", "--quiet")[1]
    assert json.loads(plain_ppl)["nll_sum"] == document["nll_sum"]


def test_json_to_stdout_is_all_there(streamh2o, folder, tmp_path):
    text = make_book(tmp_path).read_bytes()
    line = ("inspect", "-", "--model", folder, *SMALL, "--json", "-", "--out", "p.html", "--quiet")
    code, out, err = streamh2o(*line, stdin=text)
    assert (code, err) == (0, "")
    assert json.loads(out)["kept"]["tokens"]
    assert (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["*.txt"], 2, "name one"),
        (["missing.txt"], 1, "no such file"),
        (["book.txt", "--out", "nowhere/p.html"], 2, "--out nowhere/p.html"),
        (["book.txt", "--out", "book.txt"], 2, "overwrite an input"),
        (["book.txt", "--out", "a.html", "--json", "a.html"], 2, "both name"),
        (["book.txt", "--policy", "recompute"], 2, "nothing to inspect"),
        (["book.txt", "--policy", "nope"], 2, "No policy is called"),
        (["book.txt", "--cache", "9999"], 2, "512 positions"),
        (["empty.txt"], 1, "nothing was read"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(streamh2o, folder, tmp_path, arguments, code, words):
    make_book(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    got, out, err = streamh2o("inspect", "--model", folder, *SMALL, "--quiet", *arguments)
    assert (got, out) == (code, "")
    assert words in one_sentence(err)
    assert not list(tmp_path.glob("*.html"))


def test_a_text_that_breaks_off_leaves_the_page_of_what_was_read(streamh2o, folder, tmp_path):
    (tmp_path / "bad.txt").write_bytes(TEXT.encode() * 6 + b"\xff" + TEXT.encode())
    code, out, err = streamh2o("inspect", "bad.txt", "--model", folder, *SMALL, "--quiet")
    assert code == 1
    assert "bad.txt (incomplete)" in out
    assert one_sentence(err) in Page((tmp_path / "bad.inspect.html").read_text("utf-8")).text + "."


def test_a_chunk_that_fails_leaves_the_page_of_those_before(streamh2o, tmp_path):
    broken = make_folder(tmp_path / "broken", broken_token="!")
    (tmp_path / "bad.txt").write_text("They say it is better than the brown fox. " * 12 + "!")
    code, out, err = streamh2o("inspect", "bad.txt", "--model", broken, *SMALL, "--json", "a.json", "--quiet")
    assert code == 1
    assert "finite" in one_sentence(err)
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["complete"] is False
    assert document["tokens"] % 32 == 0
    assert max(each["token"] for each in document["kept"]["tokens"]) < document["tokens"]
    assert "bad.txt (incomplete)" in out
    assert "Ended early" in Page((tmp_path / "bad.inspect.html").read_text("utf-8")).text


def test_ctrl_c_shows_the_cache_as_it_is_then(folder, tmp_path):
    line = [sys.executable, "-m", "streamh2o.cli.main", "inspect", "-", "--model", folder, "--quiet"]
    line += ["--cache", "128", "--chunk", "256", "--dtype", "float32", "--threads", "1"]
    with subprocess.Popen(
        [*line, "--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "a.html")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # More than the pipe and what is read ahead (362 kB) hold: once it is written, the model has read some.
        process.stdin.write(TEXT.encode() * 4200)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:  # the pipe is still open
            time.sleep(0.05)
        out = process.stdout.read().decode()
    assert process.returncode == 130
    assert "stdin (incomplete)" in out
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["complete"] is False
    assert document["kept"]["tokens"]
    assert "Interrupted" in Page((tmp_path / "a.html").read_text("utf-8")).text


def test_the_pages_name_is_the_texts():
    names = {
        "books/moby-dick.txt": "moby-dick",
        "a.txt.gz": "a",
        "stdin": "stdin",
        "hf:pg19:test:text": "hf-pg19-test-text",
        ".gz": "text",
    }
    assert {name: _page_name(name) for name in names} == {name: f"{n}.inspect.html" for name, n in names.items()}
