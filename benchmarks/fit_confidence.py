"""Fits the weights in `streamh2o/ask/confidence.py`, on texts that no accuracy is reported on.

    python benchmarks/fit_confidence.py collect answers.jsonl jennie-gerhardt.txt moby-dick.txt --bytes 32000
    python benchmarks/fit_confidence.py fit answers.jsonl

`collect` plants made-up facts in `--bytes` of each book from `--from` on, and asks, in one pass, about each of them,
about as many that are not there, and about something else that is not said of what is there ("How tall is the Doverton
aqueduct?"), shortly and in longer ways. For each answer it writes the features and whether it is right. `fit` prints
the weights of a logistic regression with a small ridge, both outcomes weighing alike, and how many it parts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from plant_facts import add_arguments, planted_in

RIDGE = 0.02
# A question about a fact, and another about whom or what it names.
OTHER = (
    (r"pass code of (the .+)\?", "How tall is {}?"),
    (r"windows does (the .+) have", "Who painted {}?"),
    (r"Who built (the .+)\?", "When was {} burnt down?"),
    (r"keeper of (the .+)\?", "How long is the garden of {}?"),
    (r"day was (the .+) opened", "How many steps lead up to {}?"),
    (r"town was (.+) born", "Whom did {} marry?"),
    (r"portrait of (.+) hang", "How old was {} then?"),
    (r"name of (.+)'s \w+", "What colour were the eyes of {}?"),
    (r"did (.+) (?:pay|sail|spend|die)\b", "Which school did {} attend?"),
)
# Ways of asking it, whole or going on in small letters.
FORMS = ("{whole}", "Tell me, {on} I need it for a list.", "I have to know this today. {whole}", "Can you tell me {on}")


def in_form(question: str, number: int) -> str:
    """The question as it is or in one of the other FORMS, all of them for each kind of fact as `number` counts."""
    form = FORMS[(number + number // len(FORMS)) % len(FORMS)]
    return form.format(whole=question, on=question[0].lower() + question[1:])


def other_question(question: str) -> str:
    """A question that the fact behind `question` does not answer, about the same person or thing."""
    for pattern, other in OTHER:
        if match := re.search(pattern, question):
            return other.format(match.group(1))
    raise ValueError(question)


def collect(options: argparse.Namespace) -> None:
    import torch

    from streamh2o.ask import second_look
    from streamh2o.ask.answer import Answer
    from streamh2o.ask.answer_run import answer_questions
    from streamh2o.ask.confidence import confidence, features
    from streamh2o.ask.needle.evaluate import holds
    from streamh2o.ask.needle.facts import make_facts
    from streamh2o.ask.passages import Sentence
    from streamh2o.ask.read_passage import Reading
    from streamh2o.models.load import load_model
    from streamh2o.text.sources import open_inputs

    torch.set_num_threads(options.threads)
    loaded = load_model(options.model, dtype=options.dtype)
    seen: list[tuple[float, ...]] = []
    final: list[tuple[float, ...]] = []
    look_again = second_look.SecondLook.answer

    def noted(reading: Reading, best: Sentence) -> float:
        seen.append(features(reading, best))
        return confidence(reading, best)

    def answer(self: second_look.SecondLook, number: int) -> Answer:
        given = look_again(self, number)
        final.append(seen[-1])  # a question's last reading is the one that its answer comes from
        return given

    second_look.confidence, second_look.SecondLook.answer = noted, answer  # type: ignore[assignment,method-assign]
    out = Path(options.out)
    with out.open("w", encoding="utf-8") as lines:
        for number, book in enumerate(options.books):
            facts = make_facts(2 * options.facts, options.seed + number)
            there, absent = facts[: options.facts], facts[options.facts :]
            path = out.with_suffix(".txt")
            path.write_bytes(planted_in([book], there, options).text)
            asked = [("there", fact.question, fact.key) for fact in there]
            asked += [("other", other_question(fact.question), "") for fact in there]
            asked += [("absent", fact.question, "") for fact in absent]
            questions = [in_form(question, place) for place, (_, question, _) in enumerate(asked)]
            final.clear()
            answers = answer_questions(loaded, open_inputs([path])[0], questions)
            for (kind, _, key), question, given, values in zip(asked, questions, answers, final, strict=True):
                entry = {"book": number, "kind": kind, "question": question, "answer": given.answer}
                lines.write(json.dumps({**entry, "right": bool(key) and holds(given.answer, key), "x": values}) + "\n")


def logistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights [1 + features] of one and of the features `x` [n, features], for `y` [n] of 0 and 1: Newton's method."""
    scale = np.abs(x).max(0)
    x = np.hstack([np.ones((len(x), 1)), x / scale])
    share = np.where(y == 1, 0.5 / max(1, (y == 1).sum()), 0.5 / max(1, (y == 0).sum()))
    ridge = RIDGE / len(x) * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    weights = np.zeros(x.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-x @ weights))
        slope = x.T @ (share * (y - p)) - ridge @ weights
        curve = (x * (share * p * (1 - p))[:, None]).T @ x + ridge
        weights += np.linalg.solve(curve, slope)
    return weights / np.concatenate([[1.0], scale])


def fit(options: argparse.Namespace) -> None:
    entries = [json.loads(line) for line in Path(options.answers).read_text("utf-8").splitlines()]
    told = [each for each in entries if np.isfinite(each["x"]).all()]
    x = np.array([each["x"] for each in told])
    y = np.array([each["right"] for each in told], float)
    weights = logistic(x, y)
    print("WEIGHTS =", tuple(round(float(weight), 2) for weight in weights))
    for book in sorted({each["book"] for each in told}):
        held_out = np.array([each["book"] == book for each in told])
        others = logistic(x[~held_out], y[~held_out]) if (~held_out).any() else weights
        for name, these in (("fitted on all", weights), ("fitted on the other books", others)):
            found = these[0] + x @ these[1:] > 0
            counts = []
            for kind in ("there", "other", "absent"):
                of = held_out & np.array([each["kind"] == kind for each in told])
                good = found & (y == 1) if kind == "there" else ~found
                counts.append(f"{kind} {int(good[of].sum())}/{int(of.sum())}")
            print(f"book {book}, {name}: {', '.join(counts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    collecting = commands.add_parser("collect")
    add_arguments(collecting)
    collecting.set_defaults(facts=12, start=100_000, bytes=32_000, seed=500)
    collecting.add_argument("--model", default="smollm2-135m")
    collecting.add_argument("--dtype", default="bfloat16")
    collecting.add_argument("--threads", type=int, default=1)
    collecting.set_defaults(run=collect)
    fitting = commands.add_parser("fit")
    fitting.add_argument("answers")
    fitting.set_defaults(run=fit)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
