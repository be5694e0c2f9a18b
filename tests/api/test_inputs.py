"""Whatever a text is given as, its bytes are those of the text."""

import gzip
import io

import pytest

from streamh2o.api.inputs import to_source, to_sources
from streamh2o.errors import UsageError, UserError
from streamh2o.text.sources import open_source, read_block

TEXT = "Ünïcödé — and some ASCII.\r\n" * 5000


def read(source) -> bytes:
    pieces = []
    with open_source(source) as stream:
        while piece := read_block(source, stream, 1000):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode())
    return path


def test_a_path_a_text_a_file_and_pieces_are_the_same_bytes(path):
    packed = path.with_suffix(".txt.gz")
    packed.write_bytes(gzip.compress(TEXT.encode()))
    halves = (TEXT[i : i + 7] for i in range(0, len(TEXT), 7))
    with open(path, "rb") as binary, open(path, encoding="utf-8", newline="") as text:
        for given in (path, str(path), packed, binary, text, io.BytesIO(TEXT.encode()), io.StringIO(TEXT), halves):
            assert read(to_source(given)) == TEXT.encode()
        assert not binary.closed
        assert not text.closed
    assert read(to_source(text=TEXT)) == TEXT.encode()


def test_an_open_file_is_read_from_where_it_stands(path):
    with open(path, "rb") as file:
        file.seek(100)
        assert read(to_source(file)) == TEXT.encode()[100:]


def test_a_piece_is_handed_on_before_the_next_one_is_asked_for():
    asked = []

    def pieces():
        for piece in ("one ", "two "):
            asked.append(piece)
            yield piece

    source = to_source(pieces())
    with open_source(source) as stream:
        assert read_block(source, stream, 1000) == b"one "
        assert asked == ["one "]


def test_an_iterable_can_be_read_once_and_a_text_again():
    source = to_source(["a", "b"])
    assert read(source) == b"ab"
    with pytest.raises(UserError, match="only once"):
        open_source(source)
    source = to_source(text="ab")
    assert read(source) == read(source) == b"ab"


def test_half_a_surrogate_pair_is_no_utf_8_and_no_traceback():
    assert read(to_source(text="\ud800")) == b"\xed\xa0\x80"


@pytest.mark.parametrize("given", [{}, {"input": "a.txt", "text": "a"}])
def test_one_of_input_and_text_is_given(given):
    with pytest.raises(UsageError, match="takes one text"):
        to_source(**given)


def test_a_text_in_place_of_a_path_is_named():
    with pytest.raises(UsageError, match="give it as text="):
        to_source("Once upon a time\nthere was a cache.")


@pytest.mark.parametrize("given", [3, b"bytes", 2.5])
def test_what_is_no_input_is_named(given):
    with pytest.raises(UsageError, match=type(given).__name__):
        to_source(given)


def test_a_piece_that_is_no_text_is_named():
    with pytest.raises(UserError, match="int"):
        read(to_source([1, 2]))


def test_one_text_is_not_a_pattern_of_two_and_several_are(path):
    path.with_name("other.txt").write_text("other")
    pattern = str(path.with_name("*.txt"))
    with pytest.raises(UsageError, match="2 files match"):
        to_source(pattern)
    assert [read(source) for source in to_sources([pattern, ["piece"]])] == [TEXT.encode(), b"other", b"piece"]
    assert len(to_sources(path)) == 1
