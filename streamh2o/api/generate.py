"""`streamh2o.generate`: what the command `generate` does with a text, as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamh2o.api.inputs import Input, to_source
from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.api.policy import to_policy
from streamh2o.errors import UsageError
from streamh2o.runs.generate.sampling import Sampling

if TYPE_CHECKING:
    from streamh2o.api.model import Model
    from streamh2o.policies import Policy
    from streamh2o.runs.generate.generation import Generation


def generate(
    input: Input | None = None,
    *,
    prompt: str | None = None,
    max_new_tokens: int | None = 200,
    stop_at_end: bool = False,
    on_text: Callable[[str], None] | None = None,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    repetition_penalty: float = 1.1,
    repeat_last: int = 256,
    greedy: bool = False,
    seed: int | None = None,
    model: Model = "smollm2-135m",
    policy: str | Policy = "streamh2o",
    cache: int = 1024,
    sinks: int | None = None,
    recent: int | None = None,
    hitters: int | None = None,
    chunk: int = 256,
    max_tokens: int | None = None,
    bos: str = "auto",
    newline: str = "keep",
    errors: str = "strict",
    allow_special: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    kernel: str = "auto",
    **knobs: Any,
) -> Generation:
    """Continue a text of any length with a cache of fixed size.

    input, prompt: one of them. A path, an open file or an iterable of pieces of text; or the text itself.
    max_new_tokens: the most tokens to write; None for no end but the model's, or an exception from `on_text`.
    stop_at_end: the model may end the text; else it may not, and goes on. on_text: called with new text as it comes,
    whole characters only.
    temperature, top_k, top_p, min_p, repetition_penalty, repeat_last, greedy, seed: see `Sampling`. The same seed gives
    the same text again; None draws one, which the result holds.
    model: a name as on the command line, what `load_model` returns, or a pair (model, tokenizer) of transformers.
    policy, cache, sinks, recent, hitters, knobs: what the cache keeps; see `make_policy`. cache counts slots per layer
    and KV head. A policy made by `make_policy` has these numbers already. chunk: tokens of one forward pass over the
    prompt.
    max_tokens: read at most so many tokens. bos: `auto`, `yes` or `no`. newline: `keep` or `lf`. errors: `strict` or
    `replace` bytes that are not UTF-8. allow_special: names of special tokens in the text become these tokens.
    dtype, device: for a model given by its name. threads: None leaves those of torch alone. kernel: how attention is
    computed, `auto`, `compiled` or `torch`.

    Returns a `Generation`: `text` (without the prompt), `prompt_tokens`, `new_tokens`, and the settings. Raises
    UsageError for options that do not fit, UserError for a text that cannot be read or is empty.

        story = streamh2o.generate(prompt="It was a dark and", max_new_tokens=100, seed=1)
        print(story.text)
    """
    if max_new_tokens is None and not stop_at_end and on_text is None:
        raise UsageError("max_new_tokens=None has no end; give stop_at_end=True, or on_text to take the text.")
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 0.")
    if chunk < 1:
        raise UsageError(f"chunk is {chunk}; it must be at least 1.")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, repeat_last, greedy, seed)
    source = to_source(input, prompt, "generate", "prompt")
    chosen = to_policy(policy, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)

    from streamh2o.runs.generate.continuation import continue_text
    from streamh2o.runs.options import RunOptions
    from streamh2o.stream.stream_cache import StreamCache

    options = RunOptions(max_tokens=max_tokens, bos=bos, newline=newline, errors=errors, allow_special=allow_special)
    pieces: list[str] = []

    def collect(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    with torch_threads(threads):
        loaded = to_loaded(model, dtype=dtype, device=device, kernel=kernel)
        with StreamCache.for_model(loaded, policy=chosen, chunk=chunk, kernel=loaded.kernel) as slots:
            generation = continue_text(
                loaded,
                slots,
                source,
                sampling,
                options,
                max_new_tokens=max_new_tokens,
                stop_at_end=stop_at_end,
                on_text=collect,
            )
    return replace(generation, text="".join(pieces))
