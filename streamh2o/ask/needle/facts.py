"""Needles for a haystack: made-up facts, the questions about them, and a text with the facts planted in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from streamh2o.errors import UsageError
from streamh2o.text.sentences import sentences, whole_characters

REACH = 2000  # bytes around the wanted place in which a sentence should end


@dataclass(frozen=True)
class Fact:
    """A sentence, a question about it, and the words that a right answer holds. kind: number, name, place or date."""

    kind: str
    said: str
    question: str
    key: str


@dataclass(frozen=True)
class Planted:
    """A text with needles in it, and where each is: bytes `start` to `end` of the text, in the needles' order."""

    text: bytes
    places: tuple[tuple[int, int], ...]


_WORDS = {
    "first": "Amelia Barnaby Cordelia Desmond Eulalia Fergus Griselda Horatio Isolde Jasper Leopold Mirabel Octavia "
    "Phineas Quentin Rosamund Sylvester Theodora Ursula Valentine",
    "thing": "lighthouse observatory granary foundry chapel tannery brewery orchard windmill museum library hospital "
    "theatre aqueduct gatehouse smithy almshouse quarry bathhouse dovecote",
    "creature": "parrot greyhound tortoise pony raven spaniel mule goldfinch",
    "pet": "Solomon Biscuit Hannibal Duchess Pepper Nimrod Juniper Captain",
    "month": "January March April June August October November",
}
_PEOPLE = ("Ash Bex Crow Dun Ever Far Gor Hol Inch Lock", "combe ley hurst stable dale thing")
_TOWNS = (
    "Tarrow Quen Alder Brix March Pendle Sallow Thorn Wex Yarrow Cress Dover",
    "by low moor holt wick cote field hythe mere ton",
)

# What is said, what is asked, and the words that a right answer holds.
KINDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "number": (
        (
            "The pass code of the {town} {thing} is {number}.",
            "What is the pass code of the {town} {thing}?",
            "{number}",
        ),
        ("The {town} {thing} has {small} windows.", "How many windows does the {town} {thing} have?", "{small}"),
        (
            "{first} {last} paid {number} guineas for the {town} {thing}.",
            "How many guineas did {first} {last} pay for the {town} {thing}?",
            "{number}",
        ),
    ),
    "name": (
        ("The {thing} of {town} was built by {first} {last}.", "Who built the {thing} of {town}?", "{last}"),
        (
            "{first} {last} has a {creature} called {pet}.",
            "What is the name of {first} {last}'s {creature}?",
            "{pet}",
        ),
        (
            "The keeper of the {town} {thing} in those years was a certain {first} {last}.",
            "Who was the keeper of the {town} {thing}?",
            "{last}",
        ),
    ),
    "place": (
        ("{first} {last} was born in the town of {town}.", "In which town was {first} {last} born?", "{town}"),
        (
            "The portrait of {first} {last} now hangs in the {thing} at {town}.",
            "Where does the portrait of {first} {last} hang?",
            "{town}",
        ),
        ("{first} {last} spent the winter at {town}.", "Where did {first} {last} spend the winter?", "{town}"),
    ),
    "date": (
        (
            "The {town} {thing} was opened on the {day}th of {month}.",
            "On which day was the {town} {thing} opened?",
            "{month}",
        ),
        (
            "It was on the {day}th of {month} that {first} {last} sailed for {town}.",
            "When did {first} {last} sail for {town}?",
            "{month}",
        ),
        ("{first} {last} died in the year {year}.", "In which year did {first} {last} die?", "{year}"),
    ),
}


def require_kinds(kinds: Sequence[str]) -> None:
    """Raise UsageError for a kind that is not in KINDS."""
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"--kinds: there is no kind {kind!r}; choose from {', '.join(KINDS)}.")


def make_facts(count: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Fact]:
    """`count` facts about different people and towns, `kinds` in turn; the same for the same seed.

    Raises UsageError for a kind that is not in KINDS, or more facts than there are names.
    """
    require_kinds(kinds)
    chance = random.Random(seed)
    people, towns = (
        [start + end for start in starts.split() for end in ends.split()] for starts, ends in (_PEOPLE, _TOWNS)
    )
    if count > len(people):
        raise UsageError(f"There are names for {len(people)} facts, not for {count}; ask for fewer.")
    chance.shuffle(people)
    chance.shuffle(towns)
    facts = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        form = number // len(kinds) % len(KINDS[kind])
        words = {
            **{name: chance.choice(those.split()) for name, those in _WORDS.items()},
            "last": people[number],
            "town": towns[number],
            "number": chance.randrange(10_000, 100_000),
            "small": chance.randrange(12, 99),
            "day": chance.randrange(4, 21),
            "year": chance.randrange(1701, 1900),
        }
        said, question, key = (part.format(**words) for part in KINDS[kind][form])
        facts.append(Fact(kind, said, question, key))
    return facts


def plant(text: bytes, needles: Sequence[str], depths: Sequence[float]) -> Planted:
    """`text` with each needle after the sentence that ends nearest to its depth (0: the beginning, 1: the end).

    text: UTF-8. Needles of several lines stand on lines of their own. Needles of one place follow each other in their
    order.
    """
    cuts = [_sentence_end(text, round(depth * len(text))) for depth in depths]
    order = sorted(range(len(needles)), key=lambda number: cuts[number])
    parts: list[bytes] = []
    places = [(0, 0)] * len(needles)
    size = before = 0
    for number in order:
        needle, cut = needles[number].encode(), cuts[number]
        gap = b"\n\n" if b"\n" in needle else b" "
        parts += [text[before:cut], gap, needle, gap if b"\n" in needle else b""]
        start = size + cut - before + len(gap)
        places[number] = (start, start + len(needle))
        size, before = start + len(needle) + len(parts[-1]), cut
    return Planted(b"".join([*parts, text[before:]]), tuple(places))


def _sentence_end(text: bytes, wanted: int) -> int:
    first = max(0, wanted - REACH)
    data = text[first : wanted + REACH]
    left, right = whole_characters(data)
    ends = [first + left + end for _, end in sentences(data[left:right])]
    return min(ends, key=lambda end: abs(end - wanted)) if ends else first + left
