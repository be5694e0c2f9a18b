"""From names to bytes to text: sources and the incremental UTF-8 decoder."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamh2o.errors import UserError
from streamh2o.text import open_inputs
from streamh2o.text.sources import Source, open_source, read_block
from streamh2o.text.utf8 import Utf8Decoder


def contents(source: Source) -> bytes:
    parts = []
    with open_source(source) as stream:
        while data := read_block(source, stream, 1000):
            parts.append(data)
    return b"".join(parts)


def decode(data: bytes, sizes=(1,), **options) -> tuple[str, np.ndarray]:
    """`data` fed in blocks of `sizes` bytes, over and over."""
    decoder = Utf8Decoder("book.txt", **options)
    texts, offsets, position = [], [np.empty(0, np.int64)], 0
    while position < len(data):
        size = sizes[len(texts) % len(sizes)]
        text, at = decoder.feed(data[position : position + size])
        texts.append(text)
        offsets.append(at)
        position += size
    text, at = decoder.feed(b"", final=True)
    return "".join([*texts, text]), np.concatenate([*offsets, at])


# Sources


def test_a_file_is_read_as_it_is_and_its_size_is_known(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    (source,) = open_inputs([tmp_path / "a.txt"])
    assert (source.name, source.size, contents(source)) == (str(tmp_path / "a.txt"), 8, b"one\r\ntwo")
    assert contents(source) == b"one\r\ntwo", "a file can be opened again"


def test_a_glob_gives_its_files_sorted_and_leaves_folders_out(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d.txt").mkdir()
    sources = open_inputs([str(tmp_path / "*.txt"), str(tmp_path / "c.md")])
    assert [os.path.basename(source.name) for source in sources] == ["a.txt", "b.txt", "c.md"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("itself")
    (tmp_path / "a1.txt").write_text("other")
    assert [contents(source) for source in open_inputs([str(tmp_path / "a[1].txt")])] == [b"itself"]


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".xz", lzma)])
def test_compressed_files_are_decompressed(tmp_path, suffix, module):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(module.compress(b"text " * 1000))
    (source,) = open_inputs([path])
    assert source.size is None
    assert contents(source) == b"text " * 1000


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".xz", lzma)])
def test_a_damaged_compressed_file_is_one_sentence(tmp_path, suffix, module):
    path = tmp_path / f"a.txt{suffix}"
    whole = module.compress(os.urandom(5000))
    for damaged in (whole[:-30], b"not compressed at all", whole[:100] + b"\0\0\0" + whole[103:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.txt\.\w\w: can't be read"):
            contents(open_inputs([path])[0])


def test_what_cannot_be_an_input_is_one_sentence_each(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"missing\.txt: no such file"):
        open_inputs([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match="a folder, not a file"):
        open_inputs([tmp_path / "empty"])
    with pytest.raises(UserError, match="no file matches"):
        open_inputs([str(tmp_path / "empty" / "*.txt")])
    with pytest.raises(UserError, match="not a possible file name"):
        open_inputs(["a\0b"])
    with pytest.raises(UserError, match="named twice"):
        open_inputs(["-", "-"])


def test_a_file_that_vanishes_before_it_is_opened_is_one_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("gone")
    (source,) = open_inputs([tmp_path / "a.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: can't be read"):
        contents(source)


def test_standard_input_is_read_without_seeking():
    code = (
        "from streamh2o.text import open_inputs\nimport sys\n(source,) = open_inputs(['-'])\n"
        "stream = source.open()\nassert not stream.seekable()\nn = 0\n"
        "while data := stream.read(65536): n += len(data)\nprint(source.name, source.size, n)"
    )
    run = subprocess.run([sys.executable, "-c", code], input=b"x" * 300_000, capture_output=True, check=True)
    assert run.stdout.split() == [b"stdin", b"None", b"300000"]


def test_standard_input_that_python_code_put_there_is_read_too(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"given")))
    assert contents(open_inputs(["-"])[0]) == b"given"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A folder of JSON lines for training and one Parquet file for testing."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("dataset")
    rows = [{"text": "Erste Zeile\n", "title": "a"}, {"text": "zweite 漢字", "title": "b"}]
    (folder / "lines").mkdir()
    (folder / "lines" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.table({"body": ["one", "two", "three"], "number": [1, 2, 3]})
    (folder / "parquet").mkdir()
    pyarrow.parquet.write_table(table, folder / "parquet" / "test.parquet")
    return folder


def test_a_dataset_of_json_lines_is_its_documents_with_blank_lines_between(dataset):
    (source,) = open_inputs([f"hf:{dataset}/lines:train:text"])
    assert source.size is None
    assert contents(source).decode() == "Erste Zeile\n\n\nzweite 漢字"
    (source,) = open_inputs([f"hf:{dataset}/lines:train:title"])
    assert contents(source) == b"a\n\nb"


def test_a_column_called_text_or_the_only_column_of_text_need_not_be_named(dataset):
    assert contents(open_inputs([f"hf:{dataset}/lines:train"])[0]).startswith(b"Erste")
    assert contents(open_inputs([f"hf:{dataset}/parquet:test"])[0]) == b"one\n\ntwo\n\nthree"


def test_a_config_may_stand_before_the_split(dataset):
    assert contents(open_inputs([f"hf:{dataset}/parquet:default:test"])[0]) == b"one\n\ntwo\n\nthree"
    assert contents(open_inputs([f"hf:{dataset}/parquet:default:test:body"])[0]) == b"one\n\ntwo\n\nthree"


def test_mistakes_in_naming_a_dataset_are_one_sentence_each(dataset, tmp_path):
    for name, words in {
        f"hf:{dataset}/lines:train:words": "no column 'words' in this dataset; it has text, title",
        f"hf:{dataset}/lines:nosuch:text": "can't be opened",
        f"hf:{tmp_path}/nowhere:train:text": "can't be opened",
        f"hf:{dataset}/parquet:test:number": "holds int, not text",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            contents(open_inputs([name])[0])
        assert "\n" not in str(caught.value)
    for name in ("hf:", "hf:pg19", "hf:a::text", "hf:a:b:c:d:e"):
        with pytest.raises(UserError, match="not a dataset; write hf:DATASET"):
            open_inputs([name])


def test_a_dataset_with_broken_rows_is_one_sentence_and_nothing_else(tmp_path, capfd):
    (tmp_path / "train.jsonl").write_text('{"text": "ab\\ud800"}\n')
    with pytest.raises(UserError, match="train:text: this dataset can't be opened"):
        contents(open_inputs([f"hf:{tmp_path}:train:text"])[0])
    assert capfd.readouterr() == ("", "")


# Decoding


def test_a_bom_is_dropped_and_offsets_still_count_it():
    text, offsets = decode(b"\xef\xbb\xbfhi")
    assert (text, offsets.tolist()) == ("hi", [3, 4])
    assert decode(b"\xef\xbb\xbf")[0] == ""
    assert decode(b"\xef\xbb", errors="replace")[0] == "\ufffd"
    assert decode("a\ufeff".encode())[0] == "a\ufeff", "only at the very beginning"
    assert decode("\ufeff".encode(), start=100)[0] == "\ufeff"


def test_line_ends_are_kept_unless_lf_is_asked_for():
    data = b"a\r\nb\rc\n\r\n\r"
    assert decode(data)[0] == "a\r\nb\rc\n\r\n\r"
    for sizes in ((1,), (2,), (3,), (100,)):
        text, offsets = decode(data, sizes, newline="lf")
        assert text == "a\nb\rc\n\n\r"
        assert offsets.tolist() == [0, 1, 3, 4, 5, 6, 7, 9]


def test_the_first_bad_byte_is_named_after_the_text_before_it_came_out():
    decoder = Utf8Decoder("book.txt")
    assert decoder.feed("Mäd".encode())[0] == "Mäd"
    assert decoder.feed(b"chen caf\xe9 au lait \xff")[0] == "chen caf"
    with pytest.raises(UserError, match=r"book\.txt: byte 12 \(0xe9\) is not UTF-8; .*--errors replace"):
        decoder.feed(b" more")


@pytest.mark.parametrize("cut", ["é".encode()[:1], "漢".encode()[:2], "😀".encode()[:3]])
def test_an_input_that_ends_inside_a_character_is_reported(cut):
    with pytest.raises(UserError, match="ends inside a UTF-8 character that begins at byte 2;"):
        decode(b"ab" + cut)
    text, offsets = decode(b"ab" + cut, errors="replace")
    assert (text, offsets.tolist()) == ("ab\ufffd", [0, 1, 2])


FRAGMENTS = st.sampled_from(["a", "\r", "\n", "é", "漢", "😀", "\ufffd", "\ufeff", "\0", "\x1b[2J"])
BYTES = st.lists(FRAGMENTS.map(str.encode) | st.binary(max_size=3)).map(b"".join)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(BYTES, SIZES, st.sampled_from(["keep", "lf"]))
def test_replacing_gives_what_python_gives_and_true_offsets(data, sizes, newline):
    text, offsets = decode(data, sizes, errors="replace", newline=newline)
    expected = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    assert text == (expected.replace("\r\n", "\n") if newline == "lf" else expected)
    assert len(offsets) == len(text)
    assert (np.diff(offsets) > 0).all()
    for character, offset in zip(text, offsets.tolist(), strict=True):
        if character != "\ufffd":
            encoded = data[offset : offset + 4]
            converted = newline == "lf" and character == "\n" and encoded.startswith(b"\r\n")
            assert encoded.startswith(character.encode()) or converted


@given(BYTES, SIZES)
def test_strict_decoding_stops_where_python_stops(data, sizes):
    body = data.removeprefix(b"\xef\xbb\xbf")
    try:
        expected = body.decode()
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(body)
        with pytest.raises(UserError, match=rf"byte {at}\b"):
            decode(data, sizes)
    else:
        assert decode(data, sizes)[0] == expected


def test_decoding_garbage_takes_linear_time():
    data = b"\xff\xfea\x80" * 500_000
    text, offsets = decode(data, (65_536,), errors="replace")
    assert len(text) == len(offsets) == 2_000_000
