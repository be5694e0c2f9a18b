"""How likely an answer is to be right, from what the model found likely."""

from __future__ import annotations

import math

from streamh2o.ask.passages import Sentence
from streamh2o.ask.read_passage import Reading

FOUND = 0.5  # confidence from which a question counts as answered
WEIGHTS = (12.44, -5.07, 0.46)  # of one and of `features`; benchmarks/fit_confidence.py fits them


def features(reading: Reading, best: Sentence) -> tuple[float, ...]:
    """What confidence is made of.

    ln(1 + the loss, in nats, of the question's word that is least expected after the best sentence): the step from 2 to
    6 nats matters more than that from 20 to 30. And the log-probability of the answer, in nats.
    """
    return math.log1p(best.unmet), reading.logprob


def confidence(reading: Reading, best: Sentence) -> float:
    """0 to 1, by a logistic function of `features`; 0 where there is no answer."""
    if not reading.answer:
        return 0.0
    value = WEIGHTS[0] + sum(w * x for w, x in zip(WEIGHTS[1:], features(reading, best), strict=True))
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


def most_confidence(best: Sentence) -> float:
    """What `confidence` would be of an answer that the model is sure of."""
    return confidence(Reading("sure", 0.0), best)
