"""A test for `streamh2o answer`: plants made-up facts in a text, writes the questions, and marks the answers.

    python data/plant_facts.py plant book.txt planted.txt --facts 10 --absent 5 --characters 40000 --seed 1
    streamh2o answer planted.txt --questions planted.questions --json answers.json
    python data/plant_facts.py check planted.key.json answers.json

`plant` takes `--characters` of the book from `--from` on and puts the facts at even depths, each after a sentence; the
last `--absent` questions ask for facts of the same kinds that are not there. An answer is right if it holds the key
word; its place is right if the first passage, or any of the three, overlaps the planted sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

WORDS = {
    "first": "Amelia Barnaby Cordelia Desmond Eulalia Fergus Griselda Horatio Isolde Jasper Leopold Mirabel Octavia "
    "Phineas Quentin Rosamund Sylvester Theodora Ursula Valentine",
    "last": "Ashcombe Bexley Crowhurst Dunstable Everdale Farthing Gorringe Holloway Inchbald Kestrel Lockwood Mumford "
    "Nettleship Oakshott Pinkerton Quarles Rainford Swinburne Tuckwell Venning",
    "town": "Tarrowby Quenlow Aldermoor Brixholt Marchwick Pendlecote Sallowfield Thornhythe Wexmere Yarrowdale "
    "Cressingham Dovershaw Elmstoke Fallowden Gunthorpe Harkness Ibberton Kelmarsh Lanthwaite Mossbury",
    "thing": "lighthouse observatory granary foundry chapel tannery brewery orchard windmill museum library hospital "
    "theatre aqueduct gatehouse smithy almshouse quarry bathhouse dovecote",
    "creature": "parrot greyhound tortoise pony raven spaniel mule goldfinch",
    "pet": "Solomon Biscuit Hannibal Duchess Pepper Nimrod Juniper Captain",
    "month": "January March April June August October November",
}

# What is said, what is asked, and the word that a right answer holds.
KINDS = [
    ("The pass code of the {town} {thing} is {number}.", "What is the pass code of the {town} {thing}?", "{number}"),
    ("The {thing} of {town} was built by {first} {last}.", "Who built the {thing} of {town}?", "{last}"),
    ("{first} {last} was born in the town of {town}.", "In which town was {first} {last} born?", "{town}"),
    (
        "The {town} {thing} was opened on the {day}th of {month}.",
        "On which day was the {town} {thing} opened?",
        "{month}",
    ),
    (
        "{first} {last} has a {creature} called {pet}.",
        "What is the name of {first} {last}'s {creature}?",
        "{pet}",
    ),
    ("The {town} {thing} has {small} windows.", "How many windows does the {town} {thing} have?", "{small}"),
]


def facts(count: int, chance: random.Random) -> list[tuple[str, str, str]]:
    """Sentence, question and key word of `count` facts about different people, towns and things."""
    shuffled = {kind: chance.sample(words.split(), len(words.split())) for kind, words in WORDS.items()}
    made = []
    for number in range(count):
        words = {kind: each[number % len(each)] for kind, each in shuffled.items()}
        words |= {"number": str(chance.randrange(10_000, 100_000)), "small": str(chance.randrange(12, 99))}
        words["day"] = str(chance.randrange(4, 21))
        said, asked, key = KINDS[number % len(KINDS)]
        made.append((said.format(**words), asked.format(**words), key.format(**words)))
    return made


def plant(text: str, sentences: list[str]) -> str:
    """`text` with each sentence after one of its own, at even depths."""
    ends = [match.end() for match in re.finditer(r"[a-z][.!?](?=\s)", text)]
    depths = [(number + 0.5) / len(sentences) * len(text) for number in range(len(sentences))]
    places = [min(ends, key=lambda end: abs(end - depth)) for depth in depths]
    for place, sentence in sorted(zip(places, sentences, strict=True), reverse=True):
        text = f"{text[:place]} {sentence}{text[place:]}"
    return text


def make(options: argparse.Namespace) -> None:
    book = Path(options.book).read_text("utf-8-sig").replace("\r\n", "\n")
    text = book[options.start :][: options.characters]
    made = facts(options.facts + options.absent, random.Random(options.seed))
    there = made[: options.facts]
    planted = plant(text, [said for said, _, _ in there]).encode()
    out = Path(options.out)
    out.write_bytes(planted)
    out.with_suffix(".questions").write_text("".join(f"{asked}\n" for _, asked, _ in made), "utf-8")
    key = []
    for number, (said, asked, word) in enumerate(made):
        start = planted.index(said.encode()) if number < options.facts else None
        end = None if start is None else start + len(said.encode())
        key.append({"question": asked, "key": word, "start": start, "end": end})
    out.with_suffix(".key.json").write_text(json.dumps(key, indent=1) + "\n", "utf-8")


def check(options: argparse.Namespace) -> None:
    key = json.loads(Path(options.key).read_text("utf-8"))
    answers = json.loads(Path(options.answers).read_text("utf-8"))["answers"]
    count = dict.fromkeys(("there", "right", "first", "any", "found", "absent", "refused"), 0)
    for want, got in zip(key, answers, strict=True):
        mark = ""
        if want["start"] is None:
            count["absent"] += 1
            count["refused"] += not got["found"]
        else:
            places = [each["start"] < want["end"] and want["start"] < each["end"] for each in got["evidence"]]
            right = want["key"].casefold() in got["answer"].casefold()
            count["there"] += 1
            count["right"] += right
            count["first"] += bool(places and places[0])
            count["any"] += any(places)
            count["found"] += got["found"]
            mark = f"{'right' if right else 'WRONG'}, place {places.index(True) + 1 if any(places) else 'MISSED'}"
        print(f"{got['confidence']:.2f} {mark or 'absent':17} {want['question']} -> {got['answer']!r} ({want['key']})")
    print(
        f"answered {count['right']}/{count['there']}, place first {count['first']}, among three {count['any']}, found "
        f"{count['found']}; not there: {count['refused']}/{count['absent']} refused"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    planting = commands.add_parser("plant")
    planting.add_argument("book")
    planting.add_argument("out")
    planting.add_argument("--facts", type=int, default=10)
    planting.add_argument("--absent", type=int, default=0)
    planting.add_argument("--from", dest="start", type=int, default=20_000)
    planting.add_argument("--characters", type=int, default=40_000)
    planting.add_argument("--seed", type=int, default=0)
    planting.set_defaults(run=make)
    checking = commands.add_parser("check")
    checking.add_argument("key")
    checking.add_argument("answers")
    checking.set_defaults(run=check)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
