"""A text streamed once, and then what the cache still holds of it, with the words around: `streamh2o inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamh2o.errors import UserError
from streamh2o.policies import Policy
from streamh2o.runs.inspect.excerpts import Excerpts, context, read_excerpts, token_texts
from streamh2o.runs.inspect.kept import QUANTILES, CacheWatch, HeldTokens, Kept
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Observer
from streamh2o.text.rereadable import Rereadable

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.text import Source

MOST_SHOWN = 20_000  # tokens of the text in a page
MOST_HELD = 25
_JSON_BINS = 200


@dataclass(frozen=True)
class InContext:
    """A held token: its row in `HeldTokens`, the text before it, its own, and the text after it."""

    row: int
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class CacheContents:
    """What one stream left in its cache.

    result: of `PerplexityRun.result`. texts: of every held token, in the order of `held`. most_held: those that most
    layers and heads hold, with their context. failure: what ended the stream early, if anything did.
    """

    result: dict[str, Any]
    kept: Kept
    held: HeldTokens
    texts: list[str]
    most_held: list[InContext]
    excerpts: Excerpts
    failure: UserError | None = None

    @property
    def name(self) -> str:
        return str(self.result["input"]["name"])

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: the result of `streamh2o ppl`, and under `kept` what the cache holds."""
        kept, held, survival = self.kept, self.held, self.kept.survival
        edges, counts = kept.positions(0, _JSON_BINS)
        ages = kept.age_quantiles()
        known = np.flatnonzero(survival.could)
        bins = slice(int(known[0]), int(known[-1]) + 1) if len(known) else slice(0, 0)
        ranks = held.rank.tolist() if held.rank is not None else [None] * len(held.token)
        return {
            **self.result,
            "kept": {
                "layers": kept.layers,
                "kv_heads": kept.heads,
                "sinks": kept.sinks,
                "hitters": kept.hitters,
                "recent": kept.recent,
                "index": kept.index.tolist(),
                "rank": None if kept.rank is None else kept.rank.tolist(),
                "tokens": [
                    {"token": t, "byte": b, "text": x, "pairs": p, "layers": n, "age": kept.tokens - 1 - t, "rank": r}
                    for t, b, x, p, n, r in zip(
                        held.token.tolist(),
                        kept.places.of(held.token).tolist(),
                        self.texts,
                        held.pairs.tolist(),
                        (held.by_layer > 0).sum(axis=1).tolist(),
                        ranks,
                        strict=True,
                    )
                ],
                "ages": {"quantiles": list(QUANTILES), "by_head": None if ages is None else ages.tolist()},
                "positions": {"edges": edges.tolist(), "by_head": counts.tolist()},
                "survival": {
                    "age_from": survival.edges[:-1][bins].tolist(),
                    "held": survival.held[:, bins].tolist(),
                    "could": (survival.could[bins] * survival.heads).tolist(),
                    "before": survival.before[bins].tolist(),
                    "stayed": survival.stayed[bins].tolist(),
                    "stay_mean": survival.stay_mean,
                },
            },
        }


def inspect_source(
    loaded: Loaded,
    source: Source,
    policy: Policy,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    observers: Sequence[Observer] = (),
    interrupt: Interrupt | None = None,
) -> CacheContents:
    """Stream `source` under `policy` and look at the cache after each chunk and at the end.

    observers: called after every chunk. interrupt: asked before every chunk whether to stop; the inspection is
    then of the text so far. Raises KeyboardInterrupt where that is nothing, UserError where the input can't be read or
    is empty, UsageError where policy, chunk and model do not fit together or the policy keeps nothing.
    """
    failure: UserError | None = None
    with Rereadable(source) as text:
        with PerplexityRun(loaded, text.source, policy, options) as run:
            watch = CacheWatch(run.stream)
            try:
                for progress in run.chunks(interrupt):
                    assert run.block is not None
                    watch.look(run.block, progress.byte)
                    for observer in observers:
                        observer(progress)
            except UserError as error:
                if watch.tokens == 0:
                    raise
                run.complete, failure = False, error
            if watch.tokens == 0:
                if interrupt is not None and interrupt.requested:
                    raise KeyboardInterrupt
                raise UserError(f"{source.name}: nothing was read, so the cache holds nothing.")
            kept, result = watch.kept(run.reader.bos_added), run.result()
        held = kept.held_tokens()
        texts = list(token_texts(kept, held, text))
        rows = held.most_held(MOST_HELD).tolist()
        most_held = [InContext(row, *context(kept, text, int(held.token[row]))) for row in rows]
        return CacheContents(result, kept, held, texts, most_held, read_excerpts(kept, held, text, MOST_SHOWN), failure)
