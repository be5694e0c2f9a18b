import textwrap
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from streamh2o.text.sentences import LONGEST, sentences, whole_characters


@settings(max_examples=200)
@given(st.text(alphabet="aB. !?\n\r\té漢。“”'\"1", max_size=1500))
def test_sentences_are_in_order_whole_and_lose_only_white_space(text):
    data = text.encode()
    spans = sentences(data)
    assert all(0 < end - start <= LONGEST for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for start, end in spans:
        data[start:end].decode()
    kept = b"".join(bytes(byte for byte in data[a:b] if not bytes([byte]).isspace()) for a, b in spans)
    assert kept == bytes(byte for byte in data if not bytes([byte]).isspace())


def test_a_title_ends_no_sentence_and_a_quote_does():
    data = "“I know that Mr. J. Smith came on Monday.” Then all of the others went away from here! So it was.".encode()
    assert [data[a:b].decode() for a, b in sentences(data)] == [
        "“I know that Mr. J. Smith came on Monday.”",
        "Then all of the others went away from here!",
        "So it was.",
    ]


@given(st.text(min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_a_cut_out_of_utf8_is_trimmed_to_whole_characters(text, left, right):
    data = text.encode("utf-8", "replace")
    cut = data[left : len(data) - right]
    start, end = whole_characters(cut)
    cut[start:end].decode("utf-8")
    assert start <= 3
    assert len(cut) - end <= 3


def test_each_line_of_a_list_stands_alone_and_the_lines_of_a_page_do_not():
    record = "".join(f"line number-{n}: REGISTER_CONTENT is <{n * 37}>\n" for n in range(30)).encode()
    pairs = "JSON data:\n" + "".join(f' "{n:08d}-4b1b-49e0": "{n * 7:08d}-0a86-e88b",\n' for n in range(30))
    for data in (record, pairs.encode()):
        assert [data[a:b] for a, b in sentences(data)] == [line.strip() for line in data.splitlines()]
    words = [f"word{'s' * (n % 7)}" for n in range(200)]
    page = textwrap.fill(" ".join(words), 70).encode()
    assert all(page[a:b].count(b"\n") > 2 for a, b in sentences(page)[:-1])
