"""A pass that ran out of memory: the cache is put back as it was before, for the tokens to be read in two halves."""

from __future__ import annotations

from streamh2o.cache.slot_cache import SlotCache


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
