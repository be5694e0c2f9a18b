"""A pass that ran out of memory: the cache is put back as it was before, for the tokens to be read in two halves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streamh2o.cache.slot_cache import SlotCache
from streamh2o.errors import UserError


def out_of_memory(error: BaseException) -> bool:
    """Whether it is what Python or torch (torch.OutOfMemoryError is a RuntimeError) raise where memory runs out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error))


class Before:
    """What a pass changes before it comes to evicting: the slots each layer uses, and what they have scored."""

    def __init__(self, cache: SlotCache) -> None:
        self._tokens = cache.tokens
        self._layers = [(layer.used, layer.scores[:, :, : layer.used].clone(), layer.newest) for layer in cache.slots]

    def restore(self, cache: SlotCache) -> bool:
        """Put it back. False where slots have moved already, which nothing brings back."""
        if cache.tokens != self._tokens or cache.evicting is not None:
            return False
        del cache.slots[len(self._layers) :]
        for layer, (used, scores, newest) in zip(cache.slots, self._layers, strict=True):
            layer.set_back(used)
            layer.scores[:, :, :used] = scores
            layer.newest = newest
        return True


@contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Raise UserError, which begins with `what`, where the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"{what}; free some, or use a smaller --chunk, --cache or model.") from error
