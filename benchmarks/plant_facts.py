"""A test for `streamh2o answer`: plants made-up facts in a text, writes the questions, and marks the answers.

    python benchmarks/plant_facts.py plant planted.txt book.txt more.txt --facts 10 --absent 5 --bytes 240000 --seed 1
    streamh2o answer planted.txt --questions planted.questions --json answers.json
    python benchmarks/plant_facts.py check planted.key.json answers.json

`plant` joins the books, takes `--bytes` of them from `--from` on, and puts the facts at even depths
(`streamh2o/ask/needle/facts.py` makes them). The last `--absent` questions ask for facts of the same kinds that are not
there. An answer is right if it holds the key. Its place is right if one of the passages shown overlaps the planted
sentence; the first passage is counted apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from streamh2o.ask.needle.facts import KINDS, Fact, Planted, make_facts, plant


def planted_in(books: Sequence[str], facts: Sequence[Fact], options: argparse.Namespace) -> Planted:
    """The part of `books`, joined, that `options` names, with `facts` at even depths."""
    text = b"\n\n".join(Path(book).read_bytes().removeprefix(b"\xef\xbb\xbf") for book in books)
    text = text[options.start :][: options.bytes].decode("utf-8", "ignore").encode()
    return plant(text, [fact.said for fact in facts], [(number + 0.5) / len(facts) for number in range(len(facts))])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to write, which books, which part of them, and how many facts."""
    parser.add_argument("out")
    parser.add_argument("books", nargs="+")
    parser.add_argument("--facts", type=int, default=10)
    parser.add_argument("--from", dest="start", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)


def make(options: argparse.Namespace) -> None:
    facts = make_facts(options.facts + options.absent, options.seed, options.kinds.split(","))
    there = facts[: options.facts]
    planted = planted_in(options.books, there, options)
    key = [
        {"question": fact.question, "key": fact.key, "start": start, "end": end}
        for fact, (start, end) in zip(there, planted.places, strict=True)
    ]
    key += [{"question": f.question, "key": f.key, "start": None, "end": None} for f in facts[options.facts :]]
    out = Path(options.out)
    out.write_bytes(planted.text)
    out.with_suffix(".questions").write_text("".join(f"{fact.question}\n" for fact in facts), "utf-8")
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
    add_arguments(planting)
    planting.add_argument("--absent", type=int, default=0)
    planting.add_argument("--kinds", default=",".join(KINDS))
    planting.set_defaults(run=make)
    checking = commands.add_parser("check")
    checking.add_argument("key")
    checking.add_argument("answers")
    checking.set_defaults(run=check)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
