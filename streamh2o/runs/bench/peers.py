"""Other programs that one could have picked, as contestants of `bench --peers`, where they are installed.

Neither streams: llama.cpp holds the whole text, kvpress shrinks the cache of a prompt once it has been read whole. So
they read a prompt of a few thousand tokens, which is where they are at their fastest per token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from streamh2o.errors import UserError
from streamh2o.models.find import NAMED
from streamh2o.runs.bench.race import Contestants
from streamh2o.stream.lending import cache_argument

PROMPT = 2048  # tokens
STEPS = 16  # tokens that llama.cpp writes in a round


def contestants(name: str, model: PreTrainedModel, ids: Tensor, chunk: int, tell: Callable[[str], None]) -> Contestants:
    """What `bench.race` runs, for the model called `name`; `tell` hears of each peer that is missing or fails.

    Raises UserError where there is none at all. The first call of each is made here, so that a failure is not timed.
    """
    found: Contestants = {}
    for peer, make in (("llama.cpp", _llama_cpp), ("kvpress", _kvpress)):
        try:
            made = make(name, model, ids[:, :PROMPT], chunk)
            for _, call in made.values():
                call()
            found |= made
        except ImportError as error:
            tell(f"{peer}: is not installed ({error}); left out")
        except Exception as error:  # a peer's own
            tell(f"{peer}: {type(error).__name__}: {' '.join(str(error).split())[:200]}; left out")
    if not found:
        raise UserError("--peers: there is none; install one beside streamh2o: pip install llama-cpp-python kvpress")
    return found


def _gguf(name: str) -> Path:
    path = NAMED[name].path() if name in NAMED else Path(name).expanduser()
    if path is None or path.suffix.lower() != ".gguf":
        raise UserError(f"{name} is no GGUF file, which is all that it reads")
    return path


def _llama_cpp(name: str, model: PreTrainedModel, ids: Tensor, chunk: int) -> Contestants:
    """The same GGUF file, packed as it is: a prompt in batches of `chunk`, and token by token after it."""
    import llama_cpp

    path, threads, prompt = _gguf(name), torch.get_num_threads(), ids[0].tolist()
    settings: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "n_batch": chunk, "verbose": False}
    reader = llama_cpp.Llama(str(path), n_ctx=len(prompt) + STEPS, **settings)
    writer = llama_cpp.Llama(str(path), n_ctx=len(prompt) + STEPS, **settings)
    writer.eval(prompt[: len(prompt) // 2])
    start = writer.n_tokens

    def read() -> None:
        reader.reset()
        reader.eval(prompt)

    def write() -> None:
        writer.n_tokens = start  # what came after is overwritten
        for token in prompt[:STEPS]:
            writer.eval([token])

    return {
        f"llama.cpp, prompt of {len(prompt):,}": (len(prompt), read),
        f"llama.cpp, token by token after {start:,}": (STEPS, write),
    }


def _kvpress(name: str, model: PreTrainedModel, ids: Tensor, chunk: int) -> Contestants:
    """A prompt read whole, then cut to half by StreamingLLM's rule and by SnapKV's."""
    import kvpress

    def prefill(press: Any) -> Callable[[], None]:
        def call() -> None:
            cache: Any = {cache_argument(model): DynamicCache(config=model.config)}
            with press(model):
                model(ids, logits_to_keep=1, **cache)

        return call

    return {
        f"kvpress {kind.__name__}, prompt of {ids.shape[1]:,}": (ids.shape[1], prefill(kind(compression_ratio=0.5)))
        for kind in (kvpress.StreamingLLMPress, kvpress.SnapKVPress)
    }
