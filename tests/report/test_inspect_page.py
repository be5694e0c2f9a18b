"""The page and the summary of what a cache kept."""

import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from streamh2o.policies import make_policy
from streamh2o.report.inspect_figures import level, log_ticks, percent, ticks
from streamh2o.report.inspect_page import page, ranges
from streamh2o.report.inspect_summary import render_inspection
from streamh2o.runs.inspect.cache_contents import inspect_source
from streamh2o.runs.options import RunOptions
from streamh2o.terminal import as_text
from streamh2o.text.sources import open_inputs
from tests.tiny_folder import TEXT, make_book

HOSTILE = (
    "</p></div></main><script>alert(1)</script><style>*{display:none}</style><!-- ]]> & &lt; &#60;\t"
    "\" onmouseover=alert(1) x='<img src=http://example.org/x>\x1b[2J\x07\x00\u202ebidi\u2028\x85 <svg/onload=alert(1)>"
    "\r\n"
)


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
    json.dumps(found.to_dict(), allow_nan=False)
    assert "book.txt" in as_text(render_inspection(found, "x.html"))


def test_one_token_makes_a_page_too(loaded, tmp_path):
    (tmp_path / "one.txt").write_text("a")
    found = inspected(loaded, tmp_path / "one.txt")
    assert found.kept.tokens == 1
    assert "perplexity" in Page(page(found)).text


def test_what_is_shown_on_a_terminal_cannot_drive_it(loaded, tmp_path):
    (tmp_path / "bad.txt").write_bytes((HOSTILE * 6).encode())
    found = inspected(loaded, tmp_path / "bad.txt", "h2o")
    console = Console(file=io.StringIO(), width=160)
    console.print(render_inspection(found, "page\x1b[2J.html"))
    for shown in (as_text(render_inspection(found, "page\x1b[2J.html")), console.file.getvalue()):
        assert not any(ord(character) < 32 and character != "\n" for character in shown)
        assert "\u202e" not in shown
        assert f"{len(found.held.token)} distinct tokens" in shown


def test_numbers_are_written_as_people_write_them():
    assert [percent(share) for share in (0, 1, 0.66, 0.021, 0.00034)] == ["0 %", "100 %", "66 %", "2.1 %", "0.034 %"]
    assert [level(share) for share in (0, 1e-9, 0.1, 0.5, 1)] == [0, 1, 1, 5, 10]
    assert ticks(0, 1000, 5) == [0, 200, 400, 600, 800, 1000]
    assert log_ticks(90, 2500) == [100, 200, 500, 1000, 2000]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
