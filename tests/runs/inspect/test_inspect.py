"""The page, the summary and the command of `streamh2o inspect`."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from streamh2o.cli.inspect import _page_name
from streamh2o.policies import make_policy
from streamh2o.report.inspect_figures import level, log_ticks, percent, ticks
from streamh2o.report.inspect_page import page, ranges
from streamh2o.report.inspect_summary import render_inspection
from streamh2o.runs.inspect.inspection import inspect_source
from streamh2o.runs.options import RunOptions
from streamh2o.terminal import as_text
from streamh2o.text.sources import open_inputs
from tests.call import call_streamh2o, one_sentence
from tests.tiny_folder import TEXT, make_book, make_folder

SMALL = ("--cache", 48, "--chunk", 32, "--dtype", "float32", "--device", "cpu", "--threads", 1)
HOSTILE = (
    "</p></div></main><script>alert(1)</script><style>*{display:none}</style><!-- ]]> & &lt; &#60;\t"
    "\" onmouseover=alert(1) x='<img src=http://example.org/x>\x1b[2J\x07\x00\u202ebidi\u2028\x85 <svg/onload=alert(1)>"
    "\r\n"
)


@pytest.fixture
def streamh2o(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return call_streamh2o(capsys, monkeypatch)


class Page(HTMLParser):
    """A page's elements, checked to be closed in order, its attributes, and the text of each class."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.titles: list[str] = []
        self.book = ""
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in self.VOID:
            self.open.append("book" if ("class", "text") in attrs else tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag):
        last = self.open.pop()
        assert tag == last or (tag, last) == ("div", "book")

    def handle_data(self, data):
        self.text += data
        if "book" in self.open:
            self.book += data


def inspected(loaded, path, name="streamh2o", cache=48, **options):
    policy = make_policy(name, cache=cache)
    return inspect_source(loaded, open_inputs([path])[0], policy, RunOptions(chunk=32, **options))


def test_nothing_in_a_hostile_book_becomes_part_of_the_page(loaded, tmp_path):
    path = tmp_path / "<b>a&b.txt"
    path.write_bytes((HOSTILE * 9).encode())
    written = page(inspected(loaded, path))
    read = Page(written)
    assert not read.tags & {"script", "img", "b-", "link", "iframe", "object", "a"}
    assert not any(name.startswith("on") or name in ("src", "href") for name in read.attributes)
    assert "default-src 'none'" in written
    assert not any(ord(character) < 32 and character not in "\n\t" for character in written)
    assert not any(character in written for character in "\x7f\x85\u2028\u202e\ufeff")
    assert "<script>alert(1)</script>" in read.book.replace("↵\n", "")
    for escaped in ("\\x1b[2J", "\\x07", "\\x00", "\\u202e", "\\u2028", "\\x85", "&lt;", "&#60;", "\t"):
        assert escaped in read.book, escaped
    assert written.count("<style>") == 1
    assert "<b>a&b.txt" in read.text


def test_the_page_says_of_every_held_token_who_holds_it(loaded, tmp_path):
    found = inspected(loaded, make_book(tmp_path), "h2o")
    read = Page(page(found))
    told = {title.split(":")[0]: title for title in read.titles if title.startswith("token ")}
    assert len(told) == len(found.held.token)
    for token, pairs in zip(found.held.token.tolist(), found.held.pairs.tolist(), strict=True):
        assert f"{pairs} of 4 heads" in told[f"token {token:,}"]


def test_a_long_stretch_without_kept_tokens_is_folded_and_counted(loaded, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 40)
    found = inspected(loaded, path, "streamingllm")
    first, second = found.excerpts.parts
    assert f"… {second.first - first.stop:,} tokens, none kept …" in Page(page(found)).text


@pytest.mark.parametrize(
    ("name", "cache", "said"),
    [
        ("streamingllm", 48, "this policy keeps none"),
        ("local", 48, "this policy keeps none"),
        ("full", 48, "nothing was evicted yet"),
        ("streamh2o", 448, "Nothing was evicted yet"),
    ],
)
def test_a_cache_without_hitters_or_evictions_makes_a_page_too(loaded, tmp_path, name, cache, said):
    found = inspected(loaded, make_book(tmp_path), name, cache)
    assert said in Page(page(found)).text
    json.dumps(found.document(), allow_nan=False)
    assert "book.txt" in as_text(render_inspection(found, "x.html"))


def test_one_token_makes_a_page_too(loaded, tmp_path):
    (tmp_path / "one.txt").write_text("a")
    found = inspected(loaded, tmp_path / "one.txt")
    assert found.kept.tokens == 1
    assert "perplexity" in Page(page(found)).text


def test_what_is_told_on_a_terminal_cannot_drive_it(loaded, tmp_path):
    from rich.console import Console

    (tmp_path / "bad.txt").write_bytes((HOSTILE * 6).encode())
    found = inspected(loaded, tmp_path / "bad.txt", "h2o")
    console = Console(file=io.StringIO(), width=160)
    console.print(render_inspection(found, "page\x1b[2J.html"))
    for told in (as_text(render_inspection(found, "page\x1b[2J.html")), console.file.getvalue()):
        assert not any(ord(character) < 32 and character != "\n" for character in told)
        assert "\u202e" not in told
        assert f"{len(found.held.token)} distinct tokens" in told


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


def test_numbers_are_written_as_people_write_them():
    assert [percent(share) for share in (0, 1, 0.66, 0.021, 0.00034)] == ["0 %", "100 %", "66 %", "2.1 %", "0.034 %"]
    assert [level(share) for share in (0, 1e-9, 0.1, 0.5, 1)] == [0, 1, 1, 5, 10]
    assert ticks(0, 1000, 5) == [0, 200, 400, 600, 800, 1000]
    assert log_ticks(90, 2500) == [100, 200, 500, 1000, 2000]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
