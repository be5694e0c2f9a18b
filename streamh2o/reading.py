"""A short answer from a short text, and how sure the model is of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from streamh2o.head import logits_function
from streamh2o.prompts import Prompter
from streamh2o.retrieve import likelihoods
from streamh2o.stream import cache_argument

if TYPE_CHECKING:
    from streamh2o.models import Loaded

LONGEST_ANSWER = 32  # tokens


@dataclass(frozen=True)
class Reading:
    """What the model answers after a text. logprob: mean log-probability of the answer's ids there, in nats; margin: by
    how much that is above the mean for the same answer without the text."""

    answer: str
    logprob: float
    margin: float


def read(loaded: Loaded, prompter: Prompter, text: str, question: str) -> Reading:
    """The likeliest next token, again and again, up to the end of the answer, its line or LONGEST_ANSWER tokens.

    The model must not be attached to a stream.
    """
    ids, logprobs = _greedy(loaded, prompter.ask(text, question), prompter.ends())
    answer = " ".join(str(loaded.tokenizer.decode(ids, skip_special_tokens=True)).split())
    if not answer:
        return Reading("", float("-inf"), 0.0)
    alone = likelihoods(loaded, [(prompter.ask("", question), ids)])[0]
    logprob = sum(logprobs) / len(logprobs)
    return Reading(answer, logprob, logprob + float(alone.mean()))


@torch.inference_mode()
def _greedy(loaded: Loaded, prompt: list[int], ends: set[int]) -> tuple[list[int], list[float]]:
    """Ids of the answer, and the log-probability of each."""
    decoder: Any = loaded.model.get_decoder()
    logits = logits_function(loaded.model)
    # The cache is kept here, since how the model's output calls it changes between releases, as the argument does.
    cache = DynamicCache(config=loaded.model.config)
    arguments = {cache_argument(loaded.model): cache, "use_cache": True}
    ids: list[int] = []
    logprobs: list[float] = []
    feed = prompt
    for _ in range(LONGEST_ANSWER):
        hidden = decoder(input_ids=torch.tensor([feed], device=loaded.device), **arguments).last_hidden_state
        scores = logits(hidden[0, -1]).float().log_softmax(-1)
        token = int(scores.argmax())
        if token in ends:
            break
        text = loaded.tokenizer.decode([token])
        if "\n" in text and ids:
            break
        ids.append(token)
        logprobs.append(float(scores[token]))
        feed = [token]
    return ids, logprobs
