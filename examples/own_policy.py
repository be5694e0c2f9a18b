"""A policy of one's own, against two others on the same tokens: python examples/own_policy.py data/sample.txt

A policy is a frozen dataclass; its fields are its knobs, and `priority` says which middle slots are worth keeping.
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from streamh2o.models.load import load_model
from streamh2o.policies import POLICIES, Policy, make_policy
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import run_perplexity
from streamh2o.text import open_inputs


@dataclass(frozen=True)
class Neighbours(Policy):
    """Hitters by plain attention, each slot judged with its two neighbours, so that short phrases stay whole."""

    name: ClassVar[str] = "neighbours"

    def priority(self, scores: Tensor, source_index: Tensor, seen: int) -> Tensor:
        padded = scores.new_zeros(*scores.shape[:-1], scores.shape[-1] + 2)
        padded[..., 1:-1] = scores
        return padded[..., :-2] + 2 * scores + padded[..., 2:]


POLICIES[Neighbours.name] = Neighbours

loaded = load_model("smollm2-135m")
for name in ("neighbours", "h2o", "streamingllm"):
    for source in open_inputs(sys.argv[1:]):
        result = run_perplexity(loaded, source, make_policy(name, cache=256), RunOptions(chunk=128))
        print(f"{name:<14} {result['input']['name']}  perplexity {result['ppl']:.3f}")
