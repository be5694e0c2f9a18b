"""What an evaluation of retrieval consists of: a text, and questions whose answers and places are known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, BinaryIO, cast

from streamh2o.ask.needle.facts import make_facts, plant
from streamh2o.ask.needle.tasks import Item
from streamh2o.errors import UserError
from streamh2o.text import TokenReader
from streamh2o.text.sources import Source, open_source, read_block

_BLOCK = 4096  # tokens


@dataclass(frozen=True)
class Asked:
    """A question about a trial's text.

    key: the words that a right answer holds. start, end: bytes of the text that say it. depth: where that is, 0 to 1.
    All three are None where the text does not say it.
    """

    kind: str
    question: str
    key: str
    start: int | None
    end: int | None
    depth: float | None


@dataclass(frozen=True)
class Trial:
    """A text with its questions. length: tokens of the text that were asked for, before anything was planted."""

    name: str
    length: int
    text: bytes
    asked: tuple[Asked, ...]

    @property
    def there(self) -> list[Asked]:
        """The questions that the text answers."""
        return [asked for asked in self.asked if asked.start is not None]

    @property
    def source(self) -> Source:
        """The text as an input that can be read again."""
        return Source(self.name, len(self.text), lambda: cast(BinaryIO, BytesIO(self.text)))

    @property
    def key(self) -> str:
        """12 hexadecimal digits for the text and the questions."""
        asked = json.dumps([asdict(each) for each in self.asked], sort_keys=True)
        return hashlib.sha256(self.text + b"\0" + asked.encode()).hexdigest()[:12]


def cut(sources: Sequence[Source], tokenizer: Any, lengths: Sequence[int]) -> list[bytes]:
    """For each of `lengths`, so many tokens of `sources` in a row, as bytes. Raises UserError where they hold fewer."""
    joined = b"\n\n".join(_whole(source).removeprefix(b"\xef\xbb\xbf") for source in sources)
    ends: dict[int, int] = {}
    whole = Source(", ".join(source.name for source in sources), len(joined), lambda: cast(BinaryIO, BytesIO(joined)))
    with TokenReader(whole, tokenizer, bos="no", max_tokens=max(lengths)) as reader:
        for length in sorted(set(lengths)):
            while reader.tokens < length and reader.read(min(_BLOCK, length - reader.tokens)) is not None:
                pass
            if reader.tokens < length:
                raise UserError(
                    f"{whole.name}: {reader.tokens:,} tokens are fewer than {length:,}; name more or longer texts, or "
                    "lower --lengths."
                )
            ends[length] = reader.bytes_read
    return [joined[: ends[length]] for length in lengths]


def _whole(source: Source) -> bytes:
    with open_source(source) as stream:
        parts = []
        while block := read_block(source, stream, 1 << 20):
            parts.append(block)
    return b"".join(parts)


def fact_trials(
    texts: Sequence[bytes],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    per_depth: int = 1,
    absent: int = 0,
    kinds: Sequence[str],
    seed: int = 0,
) -> Iterator[Trial]:
    """One trial a length: `per_depth` facts at each of `depths`, and `absent` more questions about what is not there.

    All facts of one length stand in one text and are asked about in one pass; every length has facts of its own.
    """
    for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        places = [depth for _ in range(per_depth) for depth in depths]
        facts = make_facts(len(places) + absent, seed + number, kinds)
        planted = plant(text, [fact.said for fact in facts[: len(places)]], places)
        asked = [
            Asked(fact.kind, fact.question, fact.key, start, end, depth)
            for fact, (start, end), depth in zip(facts, planted.places, places, strict=False)
        ]
        asked += [Asked(fact.kind, fact.question, fact.key, None, None, None) for fact in facts[len(places) :]]
        yield Trial(f"facts in {length:,} tokens", length, planted.text, tuple(asked))


def task_trials(items: Sequence[Item], haystack: bytes | None = None, length: int = 0) -> Iterator[Trial]:
    """Every item as a trial of its own; with a `haystack` of `length` tokens, lost in it.

    Items that may share a text (`Item.scattered` is false) stand in one, each whole, at even depths; the lines of the
    others are scattered over a text of their own in their order.
    """
    if haystack is None:
        for number, item in enumerate(items, 1):
            yield _trial(f"item {number}", 0, b"", [item], [0.0])
    elif any(item.scattered for item in items):
        for number, item in enumerate(items, 1):
            lines = [Item(item.kind, (line,), item.question, item.key, 0) for line in item.lines]
            trial = _trial(f"item {number}", length, haystack, lines, _even(len(lines)))
            yield Trial(trial.name, length, trial.text, (trial.asked[item.line],))
    else:
        yield _trial(f"{len(items)} items", length, haystack, items, _even(len(items)))


def _even(count: int) -> list[float]:
    return [(number + 0.5) / count for number in range(count)]


def _trial(name: str, length: int, haystack: bytes, items: Sequence[Item], depths: Sequence[float]) -> Trial:
    planted = plant(haystack, [item.text for item in items], depths)
    asked = []
    for item, (start, _), depth in zip(items, planted.places, depths, strict=True):
        first, last = item.place
        asked.append(Asked(item.kind, item.question, item.key, start + first, start + last, depth))
    return Trial(name, length, planted.text, tuple(asked))
