"""The reader: blocks, BOS, limits, counts, hashes, resuming, and threads that never hang."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from streamh2o.errors import UsageError, UserError
from streamh2o.machine import rss_bytes
from streamh2o.text import Source, TokenReader, open_inputs
from tests import toy_tokenizers
from tests.toy_tokenizers import CORPUS, smollm2

TEXT = "\r\n".join(CORPUS) * 40
DATA = b"\xef\xbb\xbf" + TEXT.encode()


def source(data: bytes, name: str = "book.txt") -> Source:
    return Source(name, len(data), lambda: io.BytesIO(data))


def read_all(reader: TokenReader, size: int = 256) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    offsets: list[int] = []
    with reader:
        for block in reader.blocks(size):
            assert block.ids.dtype == block.byte_offset.dtype == np.int64
            assert len(block.ids) == len(block.byte_offset) <= size
            ids += block.ids.tolist()
            offsets += block.byte_offset.tolist()
    return ids, offsets


def with_bos(adds: bool) -> PreTrainedTokenizerFast:
    """A tokenizer as a model brings it, that puts a BOS in front by itself or not."""
    backend = toy_tokenizers.llama2() if adds else toy_tokenizers.gpt2()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_a_text_comes_out_whole_with_its_counts_and_hash():
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2())
    ids, offsets = read_all(reader)
    assert ids == toy_tokenizers.gpt2().encode(TEXT).ids
    assert offsets[0] == 3, "a byte order mark counts in offsets"
    assert reader.complete
    assert reader.exact
    assert reader.tokens == len(ids)
    assert reader.bytes_read == len(DATA)
    assert reader.words_read == len(TEXT.split())
    assert reader.sha256 == hashlib.sha256(DATA).hexdigest()


def test_all_blocks_but_the_last_are_full():
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2())
    sizes = [len(block.ids) for block in reader.blocks(100)]
    assert set(sizes[:-1]) == {100}
    assert 0 < sizes[-1] <= 100


def test_reading_in_a_thread_and_without_one_give_the_same():
    threaded = read_all(TokenReader(source(DATA), toy_tokenizers.llama2()))
    assert threaded == read_all(TokenReader(source(DATA), toy_tokenizers.llama2(), read_ahead=False), size=7)


def test_line_ends_become_lf_if_asked_and_offsets_stay_those_of_the_input():
    reader = TokenReader(source(b"one\r\n\r\ntwo"), toy_tokenizers.gpt2(), newline="lf")
    ids, offsets = read_all(reader)
    assert ids == toy_tokenizers.gpt2().encode("one\n\ntwo").ids
    assert offsets == [0, 1, 2, 3, 5, 7, 8, 9]
    assert reader.bytes_read == 10


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"], ids=["empty", "only a BOM"])
def test_an_empty_input_has_no_tokens_not_even_a_bos(data):
    reader = TokenReader(source(data), with_bos(True), bos="yes")
    assert list(reader.blocks(10)) == []
    assert (reader.tokens, reader.bytes_read, reader.words_read) == (0, len(data), 0)
    assert reader.complete
    assert not reader.bos_added


# Beginning of sequence


@pytest.mark.parametrize(("adds", "bos", "count"), [(True, "auto", 1), (False, "auto", 0), (True, "no", 0)])
def test_a_bos_is_put_first_if_the_tokenizer_would(adds, bos, count):
    reader = TokenReader(source(b"hello there"), with_bos(adds), bos=bos)
    ids, offsets = read_all(reader)
    assert ids.count(0) == count
    assert reader.bos_added == bool(count)
    assert reader.tokens == len(ids) - count
    assert offsets[0] == 0


def test_a_bos_can_be_asked_for_and_counts_in_a_block_but_not_as_a_token():
    reader = TokenReader(source(b"hello there"), with_bos(False), bos="yes")
    first = reader.read(1)
    assert first is not None
    assert (first.ids.tolist(), first.byte_offset.tolist()) == ([0], [0])
    assert reader.tokens == 0
    second = reader.read(1)
    assert second is not None
    assert second.ids.tolist() != [0]


def test_there_are_never_two_bos():
    allowed = TokenReader(source(b"<s>hello"), with_bos(True), allow_special=True)
    assert read_all(allowed)[0].count(0) == 1
    plain = TokenReader(source(b"<s>hello"), with_bos(True))
    assert read_all(plain)[0].count(0) == 1
    assert read_all(TokenReader(source(b"hello"), smollm2()))[0] == smollm2()("hello").input_ids


def test_a_bos_that_does_not_exist_or_a_wrong_word_is_a_usage_error():
    with pytest.raises(UsageError, match="no BOS token"):
        TokenReader(source(b"a"), toy_tokenizers.gpt2(), bos="yes")
    with pytest.raises(UsageError, match="auto, yes or no"):
        TokenReader(source(b"a"), toy_tokenizers.gpt2(), bos="maybe")


# Limits and counts


@pytest.mark.parametrize("limit", [1, 2, 100, 5000])
def test_max_tokens_counts_exactly_the_text_of_the_tokens_handed_out(limit):
    all_ids, all_offsets = read_all(TokenReader(source(DATA), toy_tokenizers.gpt2()))
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2(), max_tokens=limit)
    ids, _ = read_all(reader)
    assert ids == all_ids[:limit]
    assert not reader.complete
    assert reader.bytes_read == all_offsets[limit]
    covered = DATA[: reader.bytes_read]
    assert reader.words_read == len(covered[3:].decode(errors="ignore").split())
    assert reader.sha256 == hashlib.sha256(covered).hexdigest()


def test_max_tokens_of_all_tokens_or_more_is_complete():
    for limit in (3, 4, 50):
        reader = TokenReader(source(b"a7b"), toy_tokenizers.gpt2(), max_tokens=limit)
        assert len(read_all(reader)[0]) == 3
        assert reader.complete
    with pytest.raises(UsageError, match="at least 1"):
        TokenReader(source(b"a"), toy_tokenizers.gpt2(), max_tokens=0)


def test_max_tokens_reads_little_more_than_it_needs():
    data = b"word " * 1000 + b"\xff" + b"word " * 100_000
    assert len(read_all(TokenReader(source(data), toy_tokenizers.gpt2(), max_tokens=50))[0]) == 50


class Endless(io.RawIOBase):
    """Words without end, that counts what was read of it."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        self.given += size
        return (b"many words " * (size // 11 + 1))[:size]


def test_the_thread_reads_ahead_a_little_and_then_waits():
    endless = Endless()
    with TokenReader(Source("endless", None, lambda: endless), toy_tokenizers.gpt2()) as reader:
        for _ in range(200):
            reader.read(1000)
        given, since = endless.given, time.monotonic()
        while time.monotonic() - since < 3:  # until it has stood still for 3 seconds
            if given != endless.given:
                given, since = endless.given, time.monotonic()
            assert endless.given - reader.bytes_read < 600_000
            time.sleep(0.05)
        assert reader.bytes_read < endless.given


def test_the_whole_stream_is_never_in_memory():
    import tracemalloc

    reader = TokenReader(Source("endless", None, Endless), toy_tokenizers.gpt2())
    with reader:
        held = []
        tracemalloc.start()
        try:
            for _ in range(3):
                for _ in range(200):
                    reader.read(1000)
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert reader.bytes_read > 500_000
    assert held[2] < held[0] + 2_000_000


# Errors and threads


@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_bad_byte_is_reported_where_the_ids_are_consumed(read_ahead):
    data = b"good text " * 20_000 + b"\xe9" + b" and more" * 20_000
    reader = TokenReader(source(data), toy_tokenizers.gpt2(), read_ahead=read_ahead)
    with reader, pytest.raises(UserError, match=r"book\.txt: byte 200000 \(0xe9\) is not UTF-8"):
        for _ in reader.blocks(100):
            pass
    assert reader.tokens > 10_000, "what came before was handed out"
    replaced = TokenReader(source(data), toy_tokenizers.gpt2(), errors="replace")
    ids, _ = read_all(replaced)
    assert ids == toy_tokenizers.gpt2().encode(data.decode(errors="replace")).ids
    assert replaced.bytes_read == len(data)
    assert replaced.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("words", [1, 3000])
def test_every_token_before_a_character_cut_short_is_handed_out_and_then_the_error_raised(read_ahead, size, words):
    good = "naïve café " * words
    data = good.encode() + "é".encode()[:1]
    given: list[int] = []
    with TokenReader(source(data), toy_tokenizers.gpt2(), read_ahead=read_ahead) as reader:
        with pytest.raises(UserError, match=f"ends inside a UTF-8 character that begins at byte {len(data) - 1}"):
            for block in reader.blocks(size):
                given += block.ids.tolist()
        assert given == toy_tokenizers.gpt2().encode(good).ids
        assert reader.bytes_read == len(data) - 1
        assert not reader.complete
        with pytest.raises(UserError, match="ends inside"):
            reader.read(size)


def test_a_pipe_closed_inside_a_character_is_reported_with_its_offset():
    code = (
        "from streamh2o.text import TokenReader, open_inputs\nfrom streamh2o.errors import UserError\n"
        "from tests.toy_tokenizers import gpt2\nimport sys\n"
        "reader = TokenReader(open_inputs(['-'])[0], gpt2())\n"
        "try:\n    print(sum(len(block.ids) for block in reader.blocks(10)))\n"
        "except UserError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], input="漢字".encode()[:-1], capture_output=True, check=True)
    assert run.stdout.decode().startswith("stdin: the input ends inside a UTF-8 character that begins at byte 3;")
    assert run.stderr == b""


def test_closing_does_not_wait_for_a_silent_pipe_nor_does_the_process():
    code = (
        "from streamh2o.text import TokenReader, open_inputs\nfrom tests.toy_tokenizers import gpt2\nimport time\n"
        "reader = TokenReader(open_inputs(['-'])[0], gpt2())\nprint(len(reader.read(10).ids))\n"
        "begin = time.monotonic()\nreader.close()\nprint(time.monotonic() - begin < 2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"many words " * 6000)
        process.stdin.flush()
        assert process.wait(timeout=120) == 0, "it ends though the pipe is still open"
        assert process.stdout.read() == b"10\nTrue\n"
        assert process.stderr.read() == b""


def test_closing_early_ends_the_thread():
    reader = TokenReader(Source("endless", None, Endless), toy_tokenizers.gpt2())
    reader.read(10)
    assert any(thread.name == "reader of endless" for thread in threading.enumerate())
    begin = time.monotonic()
    reader.close()
    assert time.monotonic() - begin < 5
    time.sleep(0.2)
    assert not any(thread.name == "reader of endless" for thread in threading.enumerate())
    assert reader.read(10) is None


def test_long_texts_print_no_warning(capfd):
    assert len(read_all(TokenReader(source(DATA), smollm2()))[0]) > 8192
    assert capfd.readouterr() == ("", "")


# Resuming

some = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("toy", [toy_tokenizers.gpt2, toy_tokenizers.llama2, toy_tokenizers.unigram])
@given(taken=st.integers(0, 60_000), size=st.sampled_from([1000, 257]), newline=st.sampled_from(["keep", "lf"]))
@some
def test_a_resumed_reader_goes_on_as_if_never_stopped(toy, taken, size, newline):
    options = {"newline": newline, "read_ahead": False}
    unbroken = read_all(TokenReader(source(DATA), toy(), **options))
    first = TokenReader(source(DATA), toy(), **options)
    ids: list[int] = []
    while len(ids) < taken and (block := first.read(min(size, taken - len(ids)))) is not None:
        ids += block.ids.tolist()
    first.close()
    state = json.loads(json.dumps(first.state()))
    second = TokenReader(source(DATA), toy(), state=state, **options)
    assert (second.tokens, second.bytes_read, second.words_read) == (
        first.tokens,
        first.bytes_read,
        first.words_read,
    )
    more, offsets = read_all(second)
    assert ids + more == unbroken[0]
    assert offsets == unbroken[1][len(ids) :]
    assert second.complete
    assert (second.tokens, second.bytes_read) == (len(unbroken[0]), len(DATA))
    assert second.words_read == len(TEXT.split())
    assert second.sha256 == hashlib.sha256(DATA).hexdigest()


def test_a_resumed_reader_can_be_resumed_again_and_keeps_its_bos():
    unbroken = read_all(TokenReader(source(DATA), with_bos(True)))
    ids: list[int] = []
    state = None
    while True:
        reader = TokenReader(source(DATA), with_bos(True), state=state)
        block = reader.read(4001)
        reader.close()
        if block is None:
            break
        ids += block.ids.tolist()
        state = reader.state()
        assert reader.bos_added
    assert ids == unbroken[0]


def test_the_state_is_of_what_was_handed_out_not_of_what_was_read_ahead():
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2())
    reader.read(10)
    time.sleep(0.2)
    state = reader.state()
    reader.close()
    assert state["tokens"] == 10
    assert state["sha256"] == hashlib.sha256(DATA[: state["bytes"]]).hexdigest()


def test_text_without_tokens_is_not_counted_twice_when_resumed():
    data = b"\x14\x02" * 50 + b" word " + b"\x02 " * 40  # control characters, which this tokenizer drops
    reader = TokenReader(source(data), toy_tokenizers.wordpiece())
    read_all(reader)
    for taken in (reader, TokenReader(source(data[:100]), toy_tokenizers.wordpiece())):
        read_all(taken)
        whole = TokenReader(source(data), toy_tokenizers.wordpiece(), state=taken.state())
        read_all(whole)
        assert (whole.words_read, whole.bytes_read) == (reader.words_read, len(data))


def test_max_tokens_counts_the_tokens_before_the_state_too():
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2(), max_tokens=100)
    reader.read(60)
    reader.close()
    rest = TokenReader(source(DATA), toy_tokenizers.gpt2(), state=reader.state(), max_tokens=100)
    assert len(read_all(rest)[0]) == 40
    assert rest.tokens == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:50] + b"X" + data[51:], "are not those read before"),
        (lambda data: data[:3000], "ends after 3000 bytes, but"),
        (lambda data: b"", "ends after 0 bytes, but"),
    ],
    ids=["changed", "shorter", "empty"],
)
@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_changed_input_is_not_resumed(change, words, read_ahead):
    reader = TokenReader(source(DATA), toy_tokenizers.gpt2())
    reader.read(5000)
    reader.close()
    second = TokenReader(source(change(DATA)), toy_tokenizers.gpt2(), state=reader.state(), read_ahead=read_ahead)
    with second, pytest.raises(UserError, match=words):
        second.read(1)


def test_a_pipe_and_a_compressed_file_are_resumed_by_skipping(tmp_path):
    import gzip

    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress(DATA))
    (compressed,) = open_inputs([path])
    unbroken = read_all(TokenReader(source(DATA), toy_tokenizers.gpt2()))
    reader = TokenReader(compressed, toy_tokenizers.gpt2())
    reader.read(9999)
    reader.close()
    assert read_all(TokenReader(compressed, toy_tokenizers.gpt2(), state=reader.state()))[0] == unbroken[0][9999:]

    read, write = os.pipe()
    threading.Thread(target=_feed, args=(write, DATA), daemon=True).start()
    pipe = Source("stdin", None, lambda: io.FileIO(read))
    assert read_all(TokenReader(pipe, toy_tokenizers.gpt2(), state=reader.state()))[0] == unbroken[0][9999:]


def _feed(write: int, data: bytes) -> None:
    """`data` into a pipe, in uneven parts."""
    position, size = 0, 1
    while position < len(data):
        position += os.write(write, data[position : position + size])
        size = size * 7 % 4093 + 1
    os.close(write)


# Hostile input


@pytest.mark.parametrize("size", [3_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("line", [b"word \x00\x1b[2J ", b"x"])
def test_one_line_of_a_hundred_megabytes_is_read_in_flat_memory(size, line):
    class Line(io.RawIOBase):
        left = size

        def read(self, count=-1):
            count = min(count, self.left)
            self.left -= count
            return (line * (count // len(line) + 1))[:count]

    reader = TokenReader(Source("line.txt", None, Line), toy_tokenizers.gpt2())
    early = 0
    with reader:
        for block in reader.blocks(4096):
            assert len(block.ids)
            early = early or (rss_bytes() if reader.bytes_read > size // 3 else 0)
    assert reader.bytes_read == size
    assert rss_bytes() - early < 60_000_000


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"text ", b"\r\n", b"\0" * 50, b"<|im_end|>"])).map(b"".join))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_read_or_refused_in_one_sentence(data):
    replaced = TokenReader(source(data), toy_tokenizers.llama2(), errors="replace", read_ahead=False)
    _, offsets = read_all(replaced)
    assert replaced.bytes_read == len(data)
    assert offsets == sorted(offsets)
    strict = TokenReader(source(data), toy_tokenizers.llama2(), read_ahead=False)
    try:
        read_all(strict)
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        with pytest.raises(UnicodeDecodeError):
            data.decode()
    else:
        assert strict.sha256 == hashlib.sha256(data).hexdigest()
