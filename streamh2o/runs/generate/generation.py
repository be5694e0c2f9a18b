"""What came of generating text: the result that `generate` returns and `--json` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from streamh2o.versions import versions

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.runs.generate.generator import Generator

SCHEMA = 1


@dataclass(frozen=True)
class Generation:
    """New text, its counts, and the settings it was made with.

    text: the new text; "" where only a callback was given it. knobs: of the policy. cache: slots per layer and KV head.
    sampling: as used, with the seed that was drawn. prompt_tokens, new_tokens: read and written. seconds: spent on new
    tokens. slots, max_slots: held at the end, and at most. kv_bytes: of keys and values. stopped: why the text ended:
    `max-new-tokens`, `end` (of the text or of the chat) or `interrupted`, when `complete` is false.
    """

    model: dict[str, Any]
    policy: str
    knobs: dict[str, Any]
    cache: int
    chunk: int
    evict_every: int
    dtype: str
    device: str
    sampling: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_second: float | None
    slots: int
    max_slots: int
    evictions: int
    kv_bytes: int
    stopped: str
    complete: bool
    versions: dict[str, str]
    text: str = ""

    @classmethod
    def of(cls, loaded: Loaded, generator: Generator, stopped: str) -> Generation:
        """The counts and settings of what `generator` has read and written."""
        cache, sampler = generator.cache, generator.sampler
        return cls(
            model=loaded.info(),
            policy=cache.policy.name,
            knobs=asdict(cache.policy),
            cache=cache.policy.cache,
            chunk=cache.chunk,
            evict_every=cache.evict_every,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            sampling={**asdict(sampler.sampling), "seed": sampler.seed},
            prompt_tokens=generator.read_tokens,
            new_tokens=generator.new_tokens,
            seconds=generator.seconds,
            tokens_per_second=generator.new_tokens / generator.seconds if generator.seconds else None,
            slots=cache.slots,
            max_slots=cache.max_slots,
            evictions=cache.evictions,
            kv_bytes=cache.kv_bytes,
            stopped=stopped,
            complete=stopped != "interrupted",
            versions=versions(),
        )

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: plain numbers and strings, without the text."""
        fields = asdict(self)
        del fields["text"]
        return {"schema": SCHEMA, **fields}
