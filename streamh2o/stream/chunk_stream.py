"""The loop: feed chunks, evict, yield losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from streamh2o.cache.families import kv_heads, learned_positions, positions_for, require_supported
from streamh2o.cache.memory_check import require_memory
from streamh2o.cache.positions import Branches
from streamh2o.cache.quantised_slots import quantise_slots, require_bits
from streamh2o.cache.rotary import Rotary
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.cache.slots import LayerSlots
from streamh2o.errors import UsageError, UserError, out_of_memory
from streamh2o.policies import Policy
from streamh2o.stream.attach import attach, detach
from streamh2o.stream.halving import Before
from streamh2o.stream.lm_head import Head
from streamh2o.stream.token_eviction import attend_and_evict, require_token_eviction


@dataclass(frozen=True)
class Fed:
    """What one chunk gave.

    losses: [batch, scored] float32, nats; the loss of token t is that of predicting it from the tokens before, so the
        first token of a stream has none; [batch, 0] where none were asked for. On a GPU they may hold what is
        not a finite number, since `feed` does not wait to see. hidden: [batch, n, hidden_size], the last layer's states
        of the chunk.
    """

    losses: Tensor
    hidden: Tensor


class ChunkStream:
    """A text of any length through `model` with a cache of `policy.cache` slots per layer and KV head.

    model: a causal model of `transformers` in evaluation mode; it uses our attention until `close`.
    chunk: most tokens of one forward pass. batch: how many streams run side by side. per_query_head: slots for each
        query head, not each KV head, as in the H2O authors' code, for as many times the memory.
    evict: when what is over the budget goes, after each `chunk` or after each `token`; the latter gives the losses of
        `chunk=1`, whatever the chunk. kv_bits: 8 or 4 keep older keys and values as integers (`QuantisedSlots`);
        16 keeps all as the model has them.
    Raises UsageError where cache and chunk together exceed the positions the model was trained on, or where the policy
    cannot evict after every token; UserError where they need more memory than is free.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        *,
        chunk: int = 256,
        batch: int = 1,
        per_query_head: bool = False,
        evict: str = "chunk",
        kv_bits: int = 16,
    ) -> None:
        config = model.config.get_text_config()
        require_supported(model.config, type(model).__name__)
        trained = positions_for(model.config, policy.cache + chunk)
        if chunk < 1:
            raise UsageError(f"--chunk is {chunk}; it must be at least 1.")
        if policy.cache > trained:
            raise UsageError(
                f"--cache {policy.cache} exceeds the {trained} positions this model was trained on; lower it."
            )
        if policy.evicts and policy.cache + chunk > trained:
            raise UsageError(
                f"--cache {policy.cache} and --chunk {chunk} need {policy.cache + chunk} positions, the model was "
                f"trained on {trained}; lower one of them."
            )
        if evict not in ("chunk", "token"):
            raise UsageError(f"--evict is {evict!r}; it must be chunk or token.")
        if evict == "token":
            require_token_eviction(policy)
        require_bits(kv_bits, evict)
        if not policy.evicts:
            policy = replace(policy, cache=trained, recent=trained - policy.sinks)
        self.learned_positions = learned_positions(model.config)
        self.model, self.policy, self.chunk, self.batch = model, policy, chunk, batch
        self.evict, self.kv_bits = evict, kv_bits
        self.trained = trained
        group = config.num_attention_heads // kv_heads(config) if per_query_head else 1
        require_memory(model, policy, chunk, group, kv_bits, batch)
        self.cache = SlotCache(policy, Rotary.from_model(model, trained), config.num_hidden_layers, chunk, group)
        quantise_slots(self.cache, kv_bits)
        if evict == "token" and policy.evicts:
            self.cache.evicting = attend_and_evict
        self.tokens = 0  # read so far
        self.scored = 0  # losses given so far, per sequence
        self.halved = 0  # how often memory ran out in a pass and its tokens were read, or scored, in two halves
        self._decoder: Any = model.get_decoder()
        self.logits = Head(model)
        self._cache_argument = cache_argument(model)
        self._last_hidden: Tensor | None = None  # [batch, 1, hidden_size], predicts the next chunk's first token
        self._tail: Tensor | None = None  # ids that `recompute` reads again
        attach(model)
        self._attached = True

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._attached:
            self._attached = False
            detach(self.model)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lend the model out, with its own attention, for a while."""
        detach(self.model)
        try:
            yield
        finally:
            attach(self.model)

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @torch.inference_mode()
    def feed(self, ids: Tensor, score: bool = True) -> Fed:
        """Read the next tokens, `ids` [batch, n] with n up to `chunk`, and score them.

        score: False leaves the losses out, which take a third of the time where the model is small and its vocabulary
        large. Raises UserError where the text outgrows a policy that evicts nothing, and where a loss is not a number,
        unless on a GPU.
        """
        self.require_room(ids)
        on_gpu = self.model.device.type == "cuda"
        ids = ids.to(self.model.device, non_blocking=on_gpu)  # a blocking copy waits for all the GPU has been given
        hidden = self._read_or_halve(ids)
        nll = None
        if score:
            before, targets = self.predictions(ids, hidden)
            nll = self._losses(before.flatten(0, 1), targets.flatten()).view(targets.shape)
        fed = self.took(hidden, nll)
        if not on_gpu and not torch.isfinite(fed.losses).all():  # a GPU would have to come to its end first
            self._not_finite(fed)
        return fed

    def _not_finite(self, fed: Fed) -> NoReturn:
        start = self.tokens - fed.hidden.shape[1]
        first = self.tokens - fed.losses.shape[1] + int((~torch.isfinite(fed.losses)).any(0).nonzero()[0])
        # Inside a chunk it spoils the queries before it too: zero times infinity is not zero.
        later = f" or of one after it, up to {self.tokens}," if first > start else ""
        raise UserError(
            f"The loss of token {first}{later} is not a finite number ({self.model.dtype}); try --dtype float32"
            f"{' and, to know the token, --chunk 1' if later else ''}."
        )

    def _losses(self, before: Tensor, targets: Tensor) -> Tensor:
        try:
            return self.logits.losses(before, targets)
        except (MemoryError, RuntimeError) as error:
            if len(targets) < 2 or not out_of_memory(error):
                raise
        self.halved += 1
        halves = zip(before.tensor_split(2), targets.tensor_split(2), strict=True)
        return torch.cat([self._losses(*half) for half in halves])

    def _read_or_halve(self, ids: Tensor) -> Tensor:
        """`_read`, and where memory runs out, the same in two halves: evictions then come at the end of each."""
        before, tail = Before(self.cache) if ids.shape[1] > 1 else None, self._tail
        try:
            return self._read(ids)
        except (MemoryError, RuntimeError) as error:
            if before is None or not out_of_memory(error):
                raise
            self._tail = tail
            if not (self.policy.recomputes or before.restore(self.cache)):
                raise
        self.halved += 1  # out here nothing holds what the failed pass had made
        return torch.cat([self._read_or_halve(half) for half in ids.tensor_split(2, dim=1)], dim=1)

    def _read(self, ids: Tensor) -> Tensor:
        """One forward pass; hidden states [batch, n, hidden_size] of `ids`."""
        window = self.window(ids)
        return self.forward(window, self.cache, self.position_ids(window))[:, -ids.shape[1] :]

    # The steps of `feed`, which `feed_together` takes for several streams at once

    def require_room(self, ids: Tensor) -> None:
        """Raise UserError where `ids` [batch, n] do not fit behind what was read: only where nothing is evicted."""
        if ids.dim() != 2 or ids.shape[0] != self.batch or not 1 <= ids.shape[1] <= self.chunk:
            raise ValueError(f"ids are {tuple(ids.shape)}, expected [{self.batch}, 1..{self.chunk}]")
        if not self.policy.evicts and self.tokens + ids.shape[1] > self.policy.cache:
            raise UserError(
                f"The text is longer than the {self.policy.cache} tokens that --policy {self.policy.name} may keep; "
                "use --max-tokens or a policy that evicts."
            )

    def window(self, ids: Tensor) -> Tensor:
        """What a pass has to read for `ids` [batch, n], which are its last columns: more where it reads anew."""
        if not self.policy.recomputes:
            return ids
        window = ids if self._tail is None else torch.cat([self._tail, ids], dim=1)
        self._tail = window[:, -self.policy.cache :].clone()
        self.cache.reset()
        return window

    def forward(self, ids: Tensor, cache: Cache, positions: Tensor) -> Tensor:
        """The hidden states [rows, n, hidden_size] of `ids` [rows, n] behind what `cache` holds."""
        arguments = {self._cache_argument: cache, "use_cache": True, "position_ids": positions}
        states: Tensor = self._decoder(input_ids=ids, **arguments).last_hidden_state
        return states

    def predictions(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The states [batch, scored, hidden_size] that predict tokens, and those tokens [batch, scored].

        hidden: [batch, n, hidden_size], the states of `ids`, the first of which the chunk before predicts.
        """
        if self._last_hidden is None:
            return hidden[:, :-1], ids[:, 1:]
        return torch.cat([self._last_hidden, hidden[:, :-1]], dim=1), ids

    def took(self, hidden: Tensor, nll: Tensor | None) -> Fed:
        """Count a chunk as read. hidden: [batch, n, hidden_size]; nll: [batch, scored], None for none asked for."""
        if nll is None:
            nll = hidden.new_zeros(len(hidden), 0, dtype=torch.float32)
        self._last_hidden = hidden[:, -1:].clone()
        self.tokens += hidden.shape[1]
        self.scored += nll.shape[1]
        return Fed(nll, hidden)

    def position_ids(self, ids: Tensor) -> Tensor:
        """Zeros make the model's own rotation the identity, and the attention rotates by itself.

        Learned positions are those of the text: they are part of what a slot holds, and cannot be given anew.
        """
        if not self.learned_positions:
            return torch.zeros_like(ids)
        offsets, longest = torch.arange(ids.shape[1], device=ids.device), ids.shape[1]
        if isinstance(self.cache.probe, Branches):
            offsets, longest = self.cache.probe.offsets, self.cache.probe.longest
        if self.cache.tokens + longest > self.trained:
            raise UserError(
                f"A '{self.model.config.model_type}' model has learned {self.trained} positions, one for each token of "
                f"a text; use --max-tokens {self.trained}, or a model with rotary positions."
            )
        return (self.cache.tokens + offsets).expand_as(ids)

    @torch.inference_mode()
    def probe(self, ids: Tensor, observe: Callable[[LayerSlots, Tensor], None]) -> Tensor:
        """Run `ids` [batch, n] against the cache without leaving a trace: nothing is kept, scored or evicted.

        observe: called per layer, in order, with the layer's slots (the probe's own are the last n) and the attention
            probabilities [batch, kv_heads, group, n, slots + n].
        Returns the hidden states [batch, n, hidden_size].
        """
        self.cache.probe = observe
        try:
            ids = ids.to(self.model.device)
            return self.forward(ids, self.cache, self.position_ids(ids))
        finally:
            self.cache.probe = None

    @property
    def slots(self) -> int:
        """Slots per layer and KV head now."""
        return self.cache.used

    @property
    def max_slots(self) -> int:
        """The most slots held after a pass; never more than the budget."""
        return self.cache.max_slots

    @property
    def evictions(self) -> int:
        """How often the cache has evicted."""
        return self.cache.evictions

    @property
    def kv_bytes(self) -> int:
        """layers x KV heads x slots x head_dim x 2 x bytes, or what integers and scales take, at the most slots."""
        return self.cache.kv_bytes

    def composition(self) -> dict[str, int]:
        """Slots per layer and KV head now: sinks, hitters, recent."""
        return self.cache.composition()

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Tensors and counts that let another ChunkStream of the same settings go on with the same digits."""
        tensors = self.cache.state()
        for name, tensor in (("last_hidden", self._last_hidden), ("tail", self._tail)):
            if tensor is not None:
                tensors[name] = tensor
        counts = {
            "tokens": self.tokens,
            "scored": self.scored,
            "cache_tokens": self.cache.tokens,
            "evictions": self.cache.evictions,
            "max_slots": self.cache.max_slots,
            "halved": self.halved,
        }
        return tensors, counts

    def load_state(self, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
        """Go on from what `state` gave. Raises UserError where it does not fit this model."""
        self.cache.load_state(tensors, counts["cache_tokens"], counts["evictions"], counts["max_slots"])
        self._last_hidden, self._tail = tensors.get("last_hidden"), tensors.get("tail")
        self.tokens, self.scored, self.halved = counts["tokens"], counts["scored"], counts["halved"]


def cache_argument(model: PreTrainedModel) -> str:
    """How this release of transformers calls the cache: `cache` from 5.23 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.get_decoder().forward).parameters else "past_key_values"
