"""The loop: feed chunks, evict, yield losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o.cache.families import kv_heads, learned_positions, positions_for, require_supported
from streamh2o.cache.memory_check import require_memory
from streamh2o.cache.positions import Branches
from streamh2o.cache.quantised_slots import require_bits, slots_of
from streamh2o.cache.rotary import Rotary
from streamh2o.cache.slot_cache import SlotCache
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import Kernel
from streamh2o.policies import Policy
from streamh2o.stream.given_model import kernel_for, require_weights
from streamh2o.stream.lending import cache_argument, lending_of
from streamh2o.stream.lm_head import LmHead
from streamh2o.stream.model_pass import Pass
from streamh2o.stream.token_eviction import require_token_eviction


@dataclass(frozen=True)
class ChunkResult:
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

    model: a causal model of `transformers` in evaluation mode. It is lent our attention while a chunk is read, and is
        its own between chunks. `close` ends the stream; one that is garbage ends by itself.
    chunk: most tokens of one forward pass. batch: how many streams run side by side. per_query_head: slots for each
        query head, not each KV head, as in the H2O authors' code, for as many times the memory.
    evict: when what is over the budget goes, after each `chunk` or after each `token`; the latter gives the losses of
        `chunk=1`, whatever the chunk. kv_bits: 8 or 4 keep older keys and values as integers (`QuantisedSlots`);
        16 keeps all as the model has them. kernel: `auto`, `compiled`, `torch`, or one that was selected; weights in
        the blocks of a GGUF file are multiplied as `load_model` chose. engine: use faster modules while a chunk is
        read, where there are some.
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
        kernel: str | Kernel = "auto",
        engine: bool = True,
    ) -> None:
        config = model.config.get_text_config()
        require_supported(model.config, type(model).__name__)
        require_weights(model)
        trained = positions_for(model.config, policy.cache + chunk)
        _require_fit(policy, chunk, trained)
        if evict not in ("chunk", "token"):
            raise UsageError(f"--evict is {evict!r}; it must be chunk or token.")
        if evict == "token":
            require_token_eviction(policy)
        require_bits(kv_bits, evict)
        if not policy.evicts:
            policy = replace(policy, cache=trained, recent=trained - policy.sinks)
        self.learned_positions = learned_positions(model.config)
        self.model, self.policy, self.chunk, self.batch = model, policy, chunk, batch
        self.evict, self.kv_bits, self.engine = evict, kv_bits, engine
        self.kernel = kernel_for(model, kernel)
        self.trained = trained
        group = config.num_attention_heads // kv_heads(config) if per_query_head else 1
        require_memory(model, policy, chunk, group, kv_bits, batch)
        self.cache = SlotCache(
            policy,
            Rotary.from_model(model, trained),
            config.num_hidden_layers,
            chunk,
            group,
            slots_of(policy, kv_bits),
            self.kernel,
        )
        self.tokens = 0  # read so far
        self.scored = 0  # losses given so far, per sequence
        self.logits = LmHead(model, self.kernel)
        self._decoder: Any = model.get_decoder()
        self._cache_argument = cache_argument(model)
        self._last_hidden: Tensor | None = None  # [batch, 1, hidden_size], predicts the next chunk's first token
        self._tail: Tensor | None = None  # ids that `recompute` reads again
        self._whole = True  # the cache holds what was recorded, and no part of anything else
        self._lending = lending_of(model)
        self._leave = self._lending.use(self, model)

    def close(self) -> None:
        """End the stream, which can't be fed any more."""
        self._leave()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError("A stream can't be copied or pickled; use state() and load_state() of another one.")

    @torch.inference_mode()
    def feed(self, ids: Tensor, score: bool = True) -> ChunkResult:
        """Read the next tokens, `ids` [batch, n] with n up to `chunk`, and score them.

        score: False leaves the losses out, which take a third of the time where the model is small and its vocabulary
        large. Raises UserError where the text outgrows a policy that evicts nothing, and where a loss is not a number,
        unless on a GPU.
        """
        self.require_room(ids)
        on_gpu = self.model.device.type == "cuda"
        ids = ids.to(self.model.device, non_blocking=on_gpu)  # a blocking copy waits for all the GPU has been given
        window = self.window(ids)
        running = self.new_pass([self.cache], window)
        hidden = self.run(running, window, self.position_ids(window))[:, -ids.shape[1] :]
        losses = None
        if score:
            before, targets = self.predictions(ids, hidden)
            losses = self.logits.losses(before.flatten(0, 1), targets.flatten()).view(targets.shape)
        running.finish()
        result = self.record(hidden, losses)
        if not on_gpu and not torch.isfinite(result.losses).all():  # a GPU would have to come to its end first
            self._refuse_losses(result)
        return result

    def _refuse_losses(self, result: ChunkResult) -> NoReturn:
        start = self.tokens - result.hidden.shape[1]
        first = self.tokens - result.losses.shape[1] + int((~torch.isfinite(result.losses)).any(0).nonzero()[0])
        # Inside a chunk it spoils the queries before it too: zero times infinity is not zero.
        later = f" or of one after it, up to {self.tokens}," if first > start else ""
        raise UserError(
            f"The loss of token {first}{later} is not a finite number ({self.model.dtype}); try --dtype float32"
            f"{' and, to know the token, --chunk 1' if later else ''}."
        )

    # The steps of `feed`, which `feed_together` takes for several streams at once

    def require_room(self, ids: Tensor) -> None:
        """Raise UserError where `ids` [batch, n] do not fit behind what was read.

        They do where slots are evicted and positions are not learned. And where the stream is closed, or lost a chunk.
        """
        self._require_open()
        if ids.dim() != 2 or ids.shape[0] != self.batch or not 1 <= ids.shape[1] <= self.chunk:
            raise ValueError(f"ids are {tuple(ids.shape)}, expected [{self.batch}, 1..{self.chunk}]")
        if not self.policy.evicts and self.tokens + ids.shape[1] > self.policy.cache:
            raise UserError(
                f"The text is longer than the {self.policy.cache} tokens that --policy {self.policy.name} may keep; "
                "use --max-tokens or a policy that evicts."
            )
        if not self.policy.recomputes:
            self._require_positions(ids.shape[1])

    def _require_positions(self, count: int) -> None:
        """Raise UserError where the model has not learned positions for `count` tokens more."""
        if self.learned_positions and self.cache.tokens + count > self.trained:
            raise UserError(
                f"A '{self.model.config.model_type}' model has learned {self.trained} positions, one for each token of "
                f"a text; use --max-tokens {self.trained}, or a model with rotary positions."
            )

    def window(self, ids: Tensor) -> Tensor:
        """Begin a chunk: what a pass has to read for `ids` [batch, n], its last columns; more where it reads anew."""
        self._whole = False
        if not self.policy.recomputes:
            return ids
        window = ids if self._tail is None else torch.cat([self._tail, ids], dim=1)
        self._tail = window[:, -self.policy.cache :].clone()
        self.cache.reset()
        return window

    def new_pass(self, caches: Sequence[SlotCache], ids: Tensor) -> Pass:
        """A pass of `ids` [rows, n] behind what `caches` hold: one cache for all rows, or one for each."""
        return Pass(caches, ids.shape[1], evict_each_token=self.evict == "token" and self.policy.evicts)

    def run(self, running: Pass, ids: Tensor, positions: Tensor) -> Tensor:
        """The hidden states [rows, n, hidden_size] of `ids` [rows, n]."""
        arguments = {self._cache_argument: running, "use_cache": True, "position_ids": positions}
        call = partial(self._decoder, input_ids=ids, **arguments)
        states: Tensor = self._lending.run(running, call, self.engine).last_hidden_state
        return states

    def _require_open(self) -> None:
        if not self._leave.alive:
            raise UserError("This stream is closed; make another.")
        self._require_whole()

    def _require_whole(self) -> None:
        if not self._whole:
            raise UserError("A chunk of this stream was cut off, so its text has a hole; make another.")

    def predictions(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The states [batch, scored, hidden_size] that predict tokens, and those tokens [batch, scored].

        hidden: [batch, n, hidden_size], the states of `ids`, the first of which the chunk before predicts.
        """
        if self._last_hidden is None:
            return hidden[:, :-1], ids[:, 1:]
        return torch.cat([self._last_hidden, hidden[:, :-1]], dim=1), ids

    def record(self, hidden: Tensor, losses: Tensor | None) -> ChunkResult:
        """Count a chunk as read. hidden: [batch, n, hidden_size]; losses: [batch, scored], None for none asked for."""
        if losses is None:
            losses = hidden.new_zeros(len(hidden), 0, dtype=torch.float32)
        self._last_hidden = hidden[:, -1:].clone()
        self.tokens += hidden.shape[1]
        self.scored += losses.shape[1]
        self._whole = True
        return ChunkResult(losses, hidden)

    def position_ids(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        """Zeros make the model's own rotation the identity, and the attention rotates by itself.

        Learned positions are those of the text: they are part of what a slot holds, and cannot be given anew.
        """
        if not self.learned_positions:
            return torch.zeros_like(ids)
        offsets = torch.arange(ids.shape[1], device=ids.device) if branches is None else branches.offsets
        return (self.cache.tokens + offsets).expand_as(ids)

    @torch.inference_mode()
    def probe(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        """Run `ids` [batch, n] against the cache without leaving a trace: nothing is kept, scored or evicted.

        branches: how the tokens see each other; None: as a text. Returns the hidden states [batch, n, hidden_size].
        """
        self._require_open()
        self._require_positions(ids.shape[1] if branches is None else branches.longest)
        ids = ids.to(self.model.device)
        running = Pass([self.cache], ids.shape[1], probe=True, branches=branches)
        positions = self.position_ids(ids, branches)
        self._whole = False
        try:
            hidden = self.run(running, ids, positions)
            running.finish()
        finally:
            self._whole = running.left_no_trace
        return hidden

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
        """Tensors and counts that let another ChunkStream of the same settings go on with the same digits.

        Raises UserError where a chunk was cut off.
        """
        self._require_whole()
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
        }
        return tensors, counts

    def load_state(self, tensors: dict[str, Tensor], counts: dict[str, int]) -> None:
        """Go on from what `state` gave. Raises UserError where it does not fit this model."""
        self._whole = False
        self.cache.load_state(tensors, counts["cache_tokens"], counts["evictions"], counts["max_slots"])
        self._last_hidden, self._tail = tensors.get("last_hidden"), tensors.get("tail")
        self.tokens, self.scored = counts["tokens"], counts["scored"]
        self._whole = True


def _require_fit(policy: Policy, chunk: int, trained: int) -> None:
    if chunk < 1:
        raise UsageError(f"--chunk is {chunk}; it must be at least 1.")
    if policy.cache > trained:
        raise UsageError(f"--cache {policy.cache} exceeds the {trained} positions this model was trained on; lower it.")
    if policy.evicts and policy.cache + chunk > trained:
        raise UsageError(
            f"--cache {policy.cache} and --chunk {chunk} need {policy.cache + chunk} positions, the model was "
            f"trained on {trained}; lower one of them."
        )
