"""Mutated inputs, checkpoints and GGUF headers: whatever is in them, a result or one sentence, in the same memory.

At full count an hour on one core. One part of it, or one seed that failed:

    python -m tests.acceptance.test_fuzz reader 100000
    python -m tests.acceptance.test_fuzz reader 1 4711
"""

import copy
import gzip
import hashlib
import io
import json
import lzma
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streamh2o.errors import UserError
from streamh2o.machine import rss_bytes
from streamh2o.models.gguf.header import read_header
from streamh2o.models.gguf.tokenizer import byte_level_tokenizer
from streamh2o.models.gguf.unpacked import readable_errors
from streamh2o.text import Source, TokenReader
from streamh2o.text.tokenize import WindowTokenizer
from tests import model_folders, toy_tokenizers
from tests.mutate import mutate
from tests.runs.saving.test_folder import loads_or_is_damaged, save

COUNTS = {"reader": 100_000, "checkpoints": 10_000, "headers": 10_000}
GROWTH = 30_000_000  # bytes that caches of libraries and the allocator may take after the first fifth

Case = Callable[[int], object]  # runs one seed; raises where something is wrong

_BASES = [
    "\r\n".join(toy_tokenizers.CORPUS).encode(),
    b"\xef\xbb\xbf" + " ".join(toy_tokenizers.CORPUS).encode(),
    ("word " * 90 + "x" * 500 + "\n" * 200 + "\u00e9\u0301\u200d\U0001f469 " * 80).encode(),
    b"a",
    b"",
]
_ARCHIVES = [
    (pack(data), unpack) for data in _BASES for pack, unpack in ((gzip.compress, gzip.open), (lzma.compress, lzma.open))
]


@contextmanager
def reader() -> Iterator[Case]:
    with mock.patch("streamh2o.text.reader.WindowTokenizer", _tokenizer_at_hand):
        yield lambda seed: (_strict, _in_two_parts, _archived)[seed % 3](random.Random(seed), seed)


_made: dict[tuple[int, bool, int], WindowTokenizer] = {}


def _tokenizer_at_hand(tokenizer: Any, *, allow_special: bool, window: int) -> WindowTokenizer:
    """A fresh one, without the ten milliseconds that it takes to make it."""
    key = id(tokenizer), allow_special, window
    if key not in _made:
        _made[key] = WindowTokenizer(tokenizer, allow_special=allow_special, window=window)
        model = _made[key]._tokenizer.model  # its cache of words would fill up for many thousands of texts
        getattr(model, "_resize_cache", lambda _: None)(0)
    return copy.copy(_made[key])


def _how(chance: random.Random) -> tuple[Any, dict[str, Any]]:
    how = {"newline": chance.choice(["keep", "lf"]), "allow_special": chance.random() < 0.2}
    return chance.choice(toy_tokenizers.TOYS)(), {"read_ahead": chance.random() < 0.02, **how}


def _strict(chance: random.Random, seed: int) -> None:
    data, (tokenizer, how) = mutate(chance.choice(_BASES), seed), _how(chance)
    reader = TokenReader(_source(data), tokenizer, **how)
    if _refused(lambda: _drain(reader, chance.randint(1, 4096))):
        with pytest.raises(UnicodeDecodeError):
            data.decode()
    else:
        assert reader.sha256 == hashlib.sha256(data).hexdigest()
        assert reader.words_read == len(data.decode("utf-8-sig").split())


def _in_two_parts(chance: random.Random, seed: int) -> None:
    """The ids of a text in one window are those in small windows, from where another reader stopped."""
    data, (tokenizer, how) = mutate(chance.choice(_BASES), seed), _how(chance)
    whole = TokenReader(_source(data), tokenizer, errors="replace", **how)
    ids, offsets = _drain(whole, 4096)
    assert whole.bytes_read == len(data)
    assert offsets == sorted(offsets)
    with mock.patch("streamh2o.text.reader.WINDOW", chance.choice([64, 256, 1024])):
        first = TokenReader(_source(data), tokenizer, errors="replace", **how)
        block = first.read(chance.randint(1, 200))
        state = json.loads(json.dumps(first.state()))
        first.close()
        rest = TokenReader(_source(data), tokenizer, errors="replace", state=state, **how)
        parts = (block.ids.tolist() if block else []) + _drain(rest, chance.randint(1, 500))[0]
    assert (rest.bytes_read, rest.words_read) == (len(data), whole.words_read)
    assert rest.tokens == len(parts)
    if first.exact and rest.exact:
        assert parts == ids


def _archived(chance: random.Random, seed: int) -> None:
    """A damaged archive: what it still holds, or one sentence."""
    tokenizer, how = _how(chance)
    data, unpack = chance.choice(_ARCHIVES)
    packed = mutate(data, seed)
    archive = Source("a.gz", None, lambda: unpack(io.BytesIO(packed)))
    _refused(lambda: _drain(TokenReader(archive, tokenizer, errors="replace", **how), 4096))


def _source(data: bytes) -> Source:
    return Source("book.txt", len(data), lambda: io.BytesIO(data))


def _drain(reader: TokenReader, size: int) -> tuple[list[int], list[int]]:
    with reader:
        blocks = list(reader.blocks(size))
    return [i for block in blocks for i in block.ids.tolist()], [o for block in blocks for o in block.byte_offset]


def _refused(work: Callable[[], object]) -> bool:
    """Whether `work` was refused, in one sentence."""
    try:
        work()
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than a sentence: {error}") from error
        return True
    return False


@contextmanager
def checkpoints() -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), "one", "two")
        yield lambda seed: loads_or_is_damaged(Path(folder), ("json", "safetensors")[seed % 2], seed)


@contextmanager
def headers() -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        whole = model_folders.gguf_file(path, model_folders.llama()).read_bytes()
        end = whole.rindex(b"output.weight") + 64 if b"output.weight" in whole else 12_000

        def case(seed: int) -> None:
            path.write_bytes(mutate(whole, seed, within=end))
            with readable_errors("it"):
                byte_level_tokenizer(read_header(path))

        yield lambda seed: _refused(lambda: case(seed))


PARTS = {"reader": reader, "checkpoints": checkpoints, "headers": headers}


def fuzz(part: str, count: int, first: int = 0, tell: Callable[[str], None] = lambda _: None) -> list[int]:
    """Run `count` seeds from `first` on; returns those that failed. Raises AssertionError where memory grows."""
    failed, early, began = [], 0, time.monotonic()
    with PARTS[part]() as case:
        for number in range(count):
            try:
                case(first + number)
            except Exception as error:
                failed.append(first + number)
                tell(f"{part} {first + number}: {type(error).__name__}: {str(error)[:300]}")
            if number == count // 5:
                early = rss_bytes()
            if (number + 1) % 1000 == 0:
                seconds = time.monotonic() - began
                tell(f"{part}: {number + 1}, {len(failed)} failed, {seconds:.0f} s, {rss_bytes() / 1e6:.0f} MB")
    assert count < 1000 or rss_bytes() - early < GROWTH, f"grew from {early} to {rss_bytes()} bytes"
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_is_read_crashes_or_takes_more_and_more_memory(part):
    assert fuzz(part, COUNTS[part]) == []


if __name__ == "__main__":
    part, count, first = (*sys.argv[1:], "0")[:3]
    sys.exit(1 if fuzz(part, int(count), int(first), lambda line: print(line, flush=True)) else 0)
