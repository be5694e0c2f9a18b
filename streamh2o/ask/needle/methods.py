"""The ways to answer that a needle evaluation compares. Imports no torch, so that a wrong name is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamh2o.errors import UsageError
from streamh2o.policies import Policy
from streamh2o.policies.specs import policy_from_spec

if TYPE_CHECKING:
    from streamh2o.ask.needle.trials import Trial
    from streamh2o.models.loaded import Loaded

ROOM = 256  # positions for examples, question and answer beside the text


@dataclass(frozen=True)
class Method:
    """A way to answer, by its label.

    `answer`: what `streamh2o answer` does, which reads again. `full`: the whole text in one prompt. Else the text
    streams under `policy`, and the questions are put to what the cache has kept.
    """

    label: str
    cache: int
    policy: Policy | None = None

    def fits(self, loaded: Loaded, trial: Trial) -> bool:
        """Whether the model can hold what the method wants it to hold."""
        if self.label != "full":
            return True
        tokens = len(loaded.tokenizer(trial.text.decode(), add_special_tokens=False).input_ids)
        return tokens + ROOM <= loaded.trained_positions


def make_methods(specs: Sequence[str], cache: int) -> list[Method]:
    """`answer`, `full`, or a policy as `compare` takes it. Raises UsageError for others."""
    methods = []
    for spec in dict.fromkeys(specs):
        if spec in ("answer", "full"):
            methods.append(Method(spec, cache))
        else:
            policy = policy_from_spec(spec, cache)
            if policy.recomputes:
                raise UsageError(f"--policy {spec}: keeps nothing that could be asked; leave it out.")
            methods.append(Method(spec, cache, policy))
    return methods
