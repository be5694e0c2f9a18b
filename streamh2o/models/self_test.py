"""Whether a model, read in chunks, says what plain `transformers` says of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UserError

if TYPE_CHECKING:
    import torch

    from streamh2o.models.loaded import Loaded
    from streamh2o.policies import Policy

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light."
)
# Mean difference of a token's loss, in nats, that rounding explains: sums in another order, in so many bits.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_TOKENS, _CHUNK = 32, 16
_WRONG = 5  # times the tolerance: a rotation or a mask that is not the model's own changes a loss by a nat or so


def text_ids(loaded: Loaded, count: int, chunk: int) -> torch.Tensor:
    """The first tokens [1, count] of a known text, fewer where the model has no room for them and a chunk."""
    import torch

    ids = loaded.tokenizer(TEXT, add_special_tokens=False).input_ids[:count]
    return torch.tensor([ids[: max(0, loaded.trained_positions - chunk)]])


def streamed(loaded: Loaded, policy: Policy, ids: torch.Tensor, chunk: int) -> tuple[torch.Tensor, int, int]:
    """Losses [count - 1] of `ids` [1, count], evictions, and the most slots held."""
    import torch

    from streamh2o.stream.chunk_stream import ChunkStream

    with ChunkStream(loaded.model, policy, chunk=chunk, kernel=loaded.kernel) as stream:
        parts = [stream.feed(ids[:, start : start + chunk]).losses[0] for start in range(0, ids.shape[1], chunk)]
        return torch.cat(parts).cpu(), stream.evictions, stream.max_slots


def transformers_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Losses [count - 1] of `ids` [1, count] by `transformers` alone.

    Its attention is the `eager` one, the only one that does all that every model asks for: the one it takes by itself
    leaves out Gemma 2's soft-capping in the older releases. Where the attention can't be chosen it stays as it is.
    """
    import torch

    with torch.inference_mode(), _eager(model):
        logits = model(ids.to(model.device)).logits[0, :-1].float().cpu()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    from streamh2o.cache.families import own_attention

    if own_attention(model.config):
        yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def require_same(loaded: Loaded) -> None:
    """Try the model on 32 tokens, read in two chunks and at once.

    Raises UserError where the losses are not the same: a configuration of a supported family, a release of
    `transformers` or code brought along by the model that the tests have not seen must not be run wrongly.
    """
    import torch

    from streamh2o.policies import make_policy

    ids = text_ids(loaded, _TOKENS, _CHUNK)
    if ids.shape[1] < 2:
        return
    expected = transformers_losses(loaded.model, ids)
    if not torch.isfinite(expected).all():
        return  # the run itself names the token
    found, _, _ = streamed(loaded, make_policy("streamingllm", cache=_TOKENS), ids, _CHUNK)
    difference = float((found - expected).abs().mean())
    limit = _WRONG * TOLERANCE[str(loaded.dtype).removeprefix("torch.")]
    if not difference <= limit:
        raise UserError(
            f"{loaded.name}, read in chunks, gives losses {difference:.2g} nats from those of transformers (up to "
            f"{limit:g} is rounding): this model or this release of transformers does something that streamh2o does "
            "not know, and is not run."
        )
