"""Answers from what a cache has kept of a text: the question put to a stream, or the whole text in one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamh2o.ask.read_passage import LONGEST_ANSWER
from streamh2o.models.prompts import Prompter
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.lending import cache_argument
from streamh2o.stream.lm_head import LmHead

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded


def ask_stream(stream: ChunkStream, prompter: Prompter, question: str) -> str:
    """The answer after what `stream` has read, of which nothing stays in its cache."""
    prompt = prompter.ask("", question)

    def hidden(ids: list[int]) -> Tensor:
        return stream.probe(torch.tensor([prompt + ids]))[0, -1]

    return _greedy(prompter, hidden, stream.logits)


@torch.inference_mode()
def ask_with_all(loaded: Loaded, prompter: Prompter, text: str, question: str) -> str:
    """The answer with the whole text before the question, by the model's own attention: the reference."""
    decoder: Any = loaded.model.get_decoder()
    cache = DynamicCache(config=loaded.model.config)
    arguments = {cache_argument(loaded.model): cache, "use_cache": True}
    prompt = prompter.ask(text, question)

    def hidden(ids: list[int]) -> Tensor:
        feed = torch.tensor([ids[-1:] or prompt], device=loaded.device)
        states: Tensor = decoder(input_ids=feed, **arguments).last_hidden_state
        return states[0, -1]

    return _greedy(prompter, hidden, LmHead(loaded.model, loaded.kernel))


def _greedy(prompter: Prompter, hidden: Callable[[list[int]], Tensor], logits: Callable[[Tensor], Tensor]) -> str:
    """The likeliest next token, again and again, up to the end of the answer or of its line."""
    ends = prompter.ends()
    ids: list[int] = []
    with torch.inference_mode():
        for _ in range(LONGEST_ANSWER):
            token = int(logits(hidden(ids)).argmax())
            if token in ends or "\n" in prompter.decode([*ids, token]).strip():
                break
            ids.append(token)
    return prompter.decode(ids).strip()
