"""What the cache holds when a stream ends, and how long it held what it let go: numbers, without the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from streamh2o.errors import UsageError
from streamh2o.runs.inspect.places import Places
from streamh2o.stream.chunk_stream import ChunkStream

if TYPE_CHECKING:
    from streamh2o.text.reader import Block

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Ages in tokens, two bins to the octave: 0, 1, 2, 3, 4, 6, 8, 11, ... up to 2^40.
AGE_EDGES = np.unique(np.floor(2.0 ** (np.arange(-2, 81) / 2)).astype(np.int64))


@dataclass(frozen=True)
class Survival:
    """How long tokens stay as hitters, summed over the snapshots that were taken after every eviction.

    A token's age is the number of tokens read after it.
    edges: int64 [bins + 1]; bin b holds the ages from edges[b] to edges[b + 1], the end not included.
    held: int64 [layers, bins], hitters of such an age, over all heads of the layer.
    could: int64 [bins], tokens of the text of such an age that were neither sinks nor recent; times the heads it is
        what `held` could have been.
    before, stayed: int64 [bins], hitters of such an age over all layers and heads before an eviction, and how many of
        them were still there after it.
    heads: KV heads of a layer.
    """

    edges: np.ndarray
    held: np.ndarray
    could: np.ndarray
    before: np.ndarray
    stayed: np.ndarray
    heads: int

    @property
    def held_share(self) -> np.ndarray:
        """The share of the tokens of each age that a head of each layer holds: float64 [layers, bins]; nan for none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.held / (self.could * self.heads)

    @property
    def stay_share(self) -> np.ndarray:
        """The share of the hitters of each age that the next eviction leaves in place: float64 [bins]; nan for none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.stayed / self.before

    @property
    def stay_mean(self) -> float | None:
        """Of all hitters, the share that an eviction leaves in place; None before the second eviction."""
        total = int(self.before.sum())
        return int(self.stayed.sum()) / total if total else None


@dataclass(frozen=True)
class Kept:
    """What the cache holds after the last chunk. Tokens are numbered by their place in the stream, a BOS included.

    tokens: read so far. sinks, hitters, recent: slots per layer and KV head. evictions: so far.
    index: int64 [layers, kv_heads, hitters], the hitters in the order of the stream. rank: the same shape, each
    hitter's place in its head by the policy's priority, 1 for what it would give up last; None before any eviction, and
    where the cache was changed meanwhile by a chunk that failed.
    """

    tokens: int
    bos: bool
    sinks: int
    hitters: int
    recent: int
    evictions: int
    index: np.ndarray
    rank: np.ndarray | None
    survival: Survival
    places: Places

    @property
    def layers(self) -> int:
        return self.index.shape[0]

    @property
    def heads(self) -> int:
        return self.index.shape[1]

    @property
    def pairs(self) -> int:
        """Layers times KV heads: the most that can hold one token."""
        return self.layers * self.heads

    @property
    def age(self) -> np.ndarray:
        """Tokens read after each hitter: int64, the shape of `index`."""
        return self.tokens - 1 - self.index

    def age_quantiles(self, by: str = "head") -> np.ndarray | None:
        """QUANTILES of the ages, [layers, kv_heads, 5], or [layers, 5] by "layer"; None without hitters."""
        if self.hitters == 0:
            return None
        ages = self.age if by == "head" else self.age.reshape(self.layers, -1)
        return np.moveaxis(np.quantile(ages, QUANTILES, axis=-1), 0, -1)

    def positions(self, first: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Where in the text the hitters come from: edges int64 [n + 1] and counts int64 [layers, kv_heads, n].

        The bins divide the tokens from `first` on evenly; n is `bins`, or one a token where there are fewer of those.
        """
        n = max(1, min(bins, self.tokens - first))
        edges = first + (np.arange(n + 1) * (self.tokens - first)) // n
        bin_of = np.searchsorted(edges, self.index, side="right") - 1
        rows = np.arange(self.pairs).reshape(self.layers, self.heads, 1)
        inside = (bin_of >= 0) & (bin_of < n)
        counts = np.bincount((rows * n + bin_of)[inside], minlength=self.pairs * n)
        return edges, counts.reshape(self.layers, self.heads, n)

    def held_tokens(self) -> HeldTokens:
        """Every distinct token that some head holds as a hitter."""
        token, inverse = np.unique(self.index, return_inverse=True)
        inverse = inverse.reshape(-1)
        layer = np.broadcast_to(np.arange(self.layers)[:, None, None], self.index.shape).reshape(-1)
        by_layer = np.bincount(inverse * self.layers + layer, minlength=len(token) * self.layers)
        by_layer = by_layer.reshape(len(token), self.layers)
        pairs = by_layer.sum(axis=1)
        rank = None
        if self.rank is not None:
            rank = np.bincount(inverse, weights=self.rank.reshape(-1), minlength=len(token)) / pairs
        return HeldTokens(token, pairs, by_layer, rank)


@dataclass(frozen=True)
class HeldTokens:
    """Distinct hitters in the order of the stream.

    token: int64 [n]. pairs: int64 [n], how many (layer, KV head) pairs hold it. by_layer: int64 [n, layers], how many
    heads of each layer. rank: float64 [n], its mean rank in those that hold it; None where there are no ranks.
    """

    token: np.ndarray
    pairs: np.ndarray
    by_layer: np.ndarray
    rank: np.ndarray | None

    def most_held(self, count: int) -> np.ndarray:
        """Rows of the `count` tokens that most pairs hold; of equals the better ranked, then the newer first."""
        ranks = self.rank if self.rank is not None else np.zeros(len(self.token))
        return np.lexsort((-self.token, ranks, -self.pairs))[:count]


class CacheWatch:
    """Looks at a stream's cache after each chunk; what it remembers is bounded by the cache, not by the text.

    Raises UsageError where the policy keeps nothing from one chunk to the next.
    """

    def __init__(self, stream: ChunkStream) -> None:
        if stream.policy.recomputes:
            raise UsageError(
                f"--policy {stream.policy.name} reads its window anew for every chunk and keeps nothing, so there is "
                "nothing to inspect; choose another policy."
            )
        self._stream = stream
        self._places = Places()
        self._bins = len(AGE_EDGES) - 1
        self._held: np.ndarray | None = None
        self._could, self._before, self._stayed = (np.zeros(self._bins, np.int64) for _ in range(3))
        self._last: np.ndarray | None = None  # [pairs, hitters] after the eviction before
        self._tokens = self._evictions = 0
        self._parts: dict[str, int] = {}
        self._index = np.zeros((0, 0, 0), np.int64)

    @property
    def tokens(self) -> int:
        """Read so far, a BOS included."""
        return self._tokens

    def look(self, block: Block, byte: int) -> None:
        """After the chunk `block`; byte: where in the input it ends."""
        stream = self._stream
        self._places.add(block.byte_offset, byte)
        self._tokens, self._parts = stream.tokens, stream.composition()
        self._index = self._hitters()
        if stream.evictions == self._evictions:
            return
        self._evictions = stream.evictions
        self._snapshot(self._index)
        self._places.prune(self._index, stream.policy.sinks, stream.tokens - stream.policy.recent)

    def kept(self, bos: bool) -> Kept:
        """What the cache held after the last chunk that was looked at; a chunk that failed later may have changed it.

        bos: whether the stream's first token is one that the text does not have. Call `look` at least once before.
        """
        layers, heads, hitters = self._index.shape
        held = self._held if self._held is not None else np.zeros((layers, self._bins), np.int64)
        survival = Survival(AGE_EDGES, held, self._could, self._before, self._stayed, heads)
        unchanged = self._stream.cache.tokens == self._tokens
        rank = self._rank() if self._evictions and hitters and unchanged else None
        counts = (self._parts["sinks"], self._parts["hitters"], self._parts["recent"], self._evictions)
        return Kept(self._tokens, bos, *counts, self._index, rank, survival, self._places)

    def _hitters(self) -> np.ndarray:
        """The hitters now: int64 [layers, kv_heads, hitters]."""
        first = self._parts["sinks"]
        middle = slice(first, first + self._parts["hitters"])
        return np.stack([layer.source_index[0, :, middle].cpu().numpy() for layer in self._stream.cache.slots])

    def _rank(self) -> np.ndarray:
        priorities = [each[0].cpu().double() for each in self._stream.cache.priorities()]
        order = np.stack([(-each).argsort(dim=-1, stable=True).numpy() for each in priorities])
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(1, order.shape[-1] + 1)[None, None], axis=-1)
        return ranks

    def _snapshot(self, index: np.ndarray) -> None:
        """Add one eviction's outcome to the sums."""
        seen, policy = self._stream.tokens, self._stream.policy
        layers, heads, hitters = index.shape
        if self._held is None:
            self._held = np.zeros((layers, self._bins), np.int64)
        bins = _bin(seen - 1 - index.reshape(layers, -1)) + self._bins * np.arange(layers)[:, None]
        self._held += np.bincount(bins.reshape(-1), minlength=layers * self._bins).reshape(layers, -1)
        oldest = seen - policy.sinks  # not included
        bounds: np.ndarray = np.clip(AGE_EDGES, policy.recent, max(oldest, policy.recent))
        self._could += bounds[1:] - bounds[:-1]
        now = index.reshape(layers * heads, hitters)
        if self._last is not None and hitters:
            stays = _still_there(self._last, now, seen)
            bins = _bin(seen - 1 - self._last)
            self._before += np.bincount(bins.reshape(-1), minlength=self._bins)
            self._stayed += np.bincount(bins[stays], minlength=self._bins)
        self._last = now


def _bin(ages: np.ndarray) -> np.ndarray:
    return np.searchsorted(AGE_EDGES, ages, side="right") - 1


def _still_there(before: np.ndarray, now: np.ndarray, seen: int) -> np.ndarray:
    """Which entries of `before` [rows, n] their row of `now` [rows, m] still has; rows rise, and stay below `seen`."""
    row = seen * np.arange(len(now))[:, None]
    old, new = before + row, (now + row).reshape(-1)  # all of `new` rises, since each row's entries are its own
    at = np.searchsorted(new, old)
    result: np.ndarray = new[np.minimum(at, len(new) - 1)] == old
    return result
