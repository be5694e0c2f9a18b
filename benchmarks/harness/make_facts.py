"""Writes `facts.jsonl`: multiple choice about made-up facts, each question with the passage that answers it.

    python benchmarks/harness/make_facts.py > benchmarks/harness/facts.jsonl

Twelve sentences say what twelve people carry; the question asks for one of them, and the three wrong answers are what
others in the same passage carry. So the answer cannot be guessed without the passage, and position tells nothing.
"""

from __future__ import annotations

import json
import random

ITEMS, PEOPLE, CHOICES, SEED = 40, 12, 4, 0
WORDS = {
    "name": "Amelia Barnaby Cordelia Desmond Eulalia Fergus Griselda Horatio Isolde Jasper Leopold Mirabel Octavia "
    "Phineas Quentin Rosamund Sylvester Theodora Ursula Valentine",
    "kind": "red blue green yellow silver golden wooden copper broken tiny heavy painted",
    "thing": "kettle lantern ladder basket hammer mirror bottle candle blanket trumpet umbrella compass barrel feather "
    "anchor saddle",
}
NAMES, KINDS, THINGS = (words.split() for words in WORDS.values())


def item(random_: random.Random) -> dict[str, object]:
    names, things = random_.sample(NAMES, PEOPLE), random_.sample(THINGS, PEOPLE)
    carried = [f"the {random_.choice(KINDS)} {thing}" for thing in things]
    asked = random_.randrange(PEOPLE)
    wrong = random_.sample([each for each in carried if each != carried[asked]], CHOICES - 1)
    choices = random_.sample([carried[asked], *wrong], CHOICES)
    return {
        "passage": " ".join(f"{name} carries {each}." for name, each in zip(names, carried, strict=True)),
        "question": f"What does {names[asked]} carry?",
        "begin": f"{names[asked]} carries",
        "choices": choices,
        "label": choices.index(carried[asked]),
    }


def main() -> None:
    random_ = random.Random(SEED)
    for _ in range(ITEMS):
        print(json.dumps(item(random_)))


if __name__ == "__main__":
    main()
