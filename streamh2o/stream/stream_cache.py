"""The cache for `model.generate`: fixed size, for as many tokens as one likes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.decoding_cache import DecodingCache
from streamh2o.cache.families import learned_positions, positions_for, require_supported
from streamh2o.cache.rotary import Rotary
from streamh2o.cache.slot_cache import FixedCache, tell_appended
from streamh2o.errors import UsageError, UserError
from streamh2o.policies import Policy, make_policy
from streamh2o.stream.stream_cache_hooks import hook, unhook

EVICT_EVERY = 32  # decode steps; docs/notebook/speed.md has the measurement


@dataclass(frozen=True)
class Piece:
    """A part of an input that is one pass: columns `start` to `end` of one row, or of all where `row` is None."""

    groups: list[DecodingCache]
    row: int | None
    start: int
    end: int

    def of(self, inputs: Tensor) -> Tensor:
        rows = slice(None) if self.row is None else slice(self.row, self.row + 1)
        return inputs[rows, self.start : self.end]


def _cut(groups: list[DecodingCache], row: int | None, start: int, end: int, chunk: int) -> list[Piece]:
    return [Piece(groups, row, first, min(first + chunk, end)) for first in range(start, end, chunk)]


class StreamCache(FixedCache):
    """What `model.generate(..., past_key_values=cache)` takes in place of the cache that grows. Made by `for_model`.

    The rows of a batch stand side by side while they have the same length, else (left padding) each has slots of its
    own, so that a row gets what it would get alone and padding takes no slot.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy, rotary: Rotary, chunk: int, evict_every: int) -> None:
        self.layers = []  # what a cache of transformers is made of; ours are in `groups`
        self.policy, self.rotary, self.chunk, self.evict_every = policy, rotary, chunk, evict_every
        self.layers_count: int = model.config.get_text_config().num_hidden_layers
        self.groups: list[DecodingCache] = []  # of consecutive rows of the batch, each with slots of its own
        self.active: list[DecodingCache] = []  # those that the running pass is for; none between passes
        self.tokens = 0  # columns of the batch that went through, padding included
        self.wanted = 0  # newest hidden states that the call at hand is for; 0 for all
        self.inside = False  # a piece of a longer input is running
        self.cut = False  # a call was cut off between its pieces, so that the text has a hole
        self._decoder = weakref.ref(model.get_decoder())
        self._detach = weakref.finalize(self, unhook, self._decoder)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        cache: int = 1024,
        policy: str | Policy = "streamh2o",
        *,
        sinks: int | None = None,
        recent: int | None = None,
        hitters: int | None = None,
        chunk: int | None = None,
        evict_every: int = EVICT_EVERY,
        **knobs: Any,
    ) -> StreamCache:
        """A cache of `cache` slots per layer and KV head for `model`, a causal model of `transformers`.

        policy: a name, whose budget is sinks + recent + hitters = cache, or a policy made by `make_policy` (then the
        other numbers are its own). knobs: the policy's further fields. chunk: most tokens of one pass; a longer prompt
        goes through in pieces (256, or what the trained length leaves). evict_every: decode steps between evictions, so
        that up to cache + evict_every slots are held while tokens come one by one.

        The model answers to this cache until `detach`, the end of a `with`, or the cache's own end; meanwhile it works
        as ever without it. Raises UsageError for settings that don't fit the model, UserError for a model that is not
        supported.
        """
        if not isinstance(model, PreTrainedModel):
            raise UsageError(f"StreamCache needs a model of transformers, and got a {type(model).__name__}.")
        if "kv_bits" in knobs:
            raise UsageError("A StreamCache keeps keys and values as the model has them; kv_bits is for a Stream.")
        config = model.config
        require_supported(config, getattr(config, "name_or_path", "") or type(model).__name__)
        made = policy
        if isinstance(made, str):
            made = make_policy(made, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)
        if learned_positions(config):
            raise UserError(
                f"A '{config.model_type}' model has learned its positions, which can't be given anew when slots move; "
                "a StreamCache needs a model with rotary positions."
            )
        if model.get_decoder() is not model.base_model:
            raise UserError(
                f"A {type(model).__name__} has its text model inside one for images, where padding can't be seen; load "
                "its text side alone (AutoModelForCausalLM with the text configuration) for a StreamCache."
            )
        trained = positions_for(config, made.cache + (chunk or 1))
        if made.recomputes:
            raise UsageError(f"The policy {made.name} reads its window again for every token; it can't generate.")
        if not made.evicts:
            made = replace(made, cache=trained, recent=trained - made.sinks)
        if chunk is None:
            chunk = max(1, min(256, trained - made.cache if made.evicts else trained))
        for name, value in (("chunk", chunk), ("evict_every", evict_every)):
            if value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1.")
        if made.evicts and made.cache + chunk > trained:
            raise UsageError(
                f"A cache of {made.cache} slots and a chunk of {chunk} need {made.cache + chunk} positions, the model "
                f"was trained on {trained}; lower one of them."
            )
        hook(model)
        try:
            return cls(model, made, Rotary.from_model(model, trained), chunk, evict_every)
        except BaseException:
            unhook(weakref.ref(model.get_decoder()))
            raise

    def detach(self) -> None:
        """Let go of the model. What was read stays, to look at; the model can't be called with this cache any more."""
        self._detach()

    def __enter__(self) -> StreamCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # What it holds

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first call."""
        return sum(group.slots[0].keys.shape[0] for group in self.groups if group.slots)

    @property
    def slots(self) -> int:
        """Slots per layer and KV head now; of the longest row, where the rows of a batch differ."""
        return max((group.used for group in self.groups), default=0)

    @property
    def max_slots(self) -> int:
        """The most slots per layer and KV head held after a pass, before it evicted."""
        return max((group.max_slots for group in self.groups), default=0)

    @property
    def evictions(self) -> int:
        """How often the cache has evicted; of the row that did so most."""
        return max((group.evictions for group in self.groups), default=0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the buffers: keys, rotated keys, values, with their room for the next chunk."""
        layers = [layer for group in self.groups for layer in group.slots]
        return sum(layer.keys.nbytes + layer.rotated.nbytes + layer.values.nbytes for layer in layers)

    def composition(self) -> list[dict[str, int]]:
        """Slots per layer and KV head now by what keeps them there, for each group of rows of the same length."""
        return [group.composition() for group in self.groups]

    # What the hooks call

    def belongs_to(self, decoder: nn.Module) -> bool:
        return self._detach.alive and self._decoder() is decoder

    def pieces(self, inputs: Tensor, mask: Tensor | None) -> list[Piece]:
        """`inputs` [batch, columns, ...] as passes of at most `chunk` tokens, without padding.

        mask: [batch, columns so far and of the inputs], 0 for padding. Raises UserError where padding stands anywhere
        but before a row's first token.
        """
        if self.cut:
            raise UserError("The last call with this StreamCache was cut off in a prompt; reset() it, or make another.")
        rows, columns = inputs.shape[:2]
        if self.groups and self.rows not in (0, rows):
            raise UserError(
                f"This StreamCache holds {self.rows} rows and was given {rows}; reset() it, or make another."
            )
        if mask is not None and mask.dim() != 2:
            raise UserError("A StreamCache takes attention masks of two dimensions, which tell the padding.")
        start = self._padding(None if mask is None else mask[:, -columns:].bool(), rows)
        if len(set(start)) > 1 and not self.groups:
            self.groups = [self.new_group() for _ in range(rows)]
        if not self.groups:
            self.groups = [self.new_group()]
        if len(self.groups) == 1 or columns == 1:
            return _cut(self.groups, None, start[0], columns, self.chunk)
        return [
            piece
            for row, group in enumerate(self.groups)
            for piece in _cut([group], row, start[row], columns, self.chunk)
        ]

    def _padding(self, mask: Tensor | None, rows: int) -> list[int]:
        """How many columns of padding each row begins with."""
        if mask is None or bool(mask.all()):
            return [0] * rows
        start = (~mask).sum(dim=1)
        if self.tokens or not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) >= start[:, None]):
            raise UserError(
                "A StreamCache takes padding before the first token of a text only; set padding_side='left', and leave "
                "padding out of what continues a text."
            )
        if int(start.max()) == mask.shape[1]:
            raise UserError(f"Row {int(start.argmax())} of the batch is padding only; leave it out.")
        counts: list[int] = start.tolist()
        return counts

    def new_group(self) -> DecodingCache:
        """An empty one."""
        return DecodingCache(self.policy, self.rotary, self.layers_count, self.chunk, self.evict_every)

    def begin(self, groups: list[DecodingCache], count: int) -> None:
        """Before a pass of `count` tokens for `groups`."""
        for group in groups:
            if not self.policy.evicts and group.tokens + count > self.policy.cache:
                raise UserError(
                    f"The text is longer than the {self.policy.cache} tokens that the policy {self.policy.name} may "
                    "keep; use a policy that evicts."
                )
            group.begin(count)
        self.active = groups

    def finish(self, count: int) -> None:
        """After a pass of `count` tokens."""
        for group in self.active:
            group.finish(count)
        self.active = []

    def undo(self) -> None:
        """Take back a pass that did not come to its end."""
        for group in self.active:
            group.undo()
        self.active = []

    # What `transformers` calls

    @property
    def told(self) -> int:
        """All tokens between calls, when `generate` asks; none while a pass is running."""
        return 0 if self.active else self.tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append un-rotated keys and values [batch, kv_heads, n, head_dim]; returned as they came."""
        if not self.active:
            raise UserError(
                "This StreamCache does not belong to the model that was called with it, or was detached; make one with "
                "StreamCache.for_model(model)."
            )
        if len(self.active) == 1:
            groups = [(self.active[0], self.active[0].append(key_states, value_states, layer_idx))]
        else:
            rows = zip(self.active, key_states.split(1), value_states.split(1), strict=True)
            groups = [(group, group.append(key, value, layer_idx)) for group, key, value in rows]
        tell_appended(list(groups))
        return key_states, value_states

    is_croppable = FixedCache.is_compileable

    @property
    def is_initialized(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        return f"StreamCache(policy={self.policy}, slots={self.slots}, tokens={self.tokens})"

    def reset(self) -> None:
        """Forget the text, for another one."""
        self.groups, self.tokens, self.cut = [], 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n] of the batch, in that order."""
        if len(self.groups) == 1:
            self.groups = [self.groups[0].rows(indices)]
        elif self.groups:
            first = torch.zeros(1, dtype=torch.int64)
            self.groups = [self.groups[index].rows(first) for index in indices.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put every row of the batch there `repeats` times."""
        if self.groups:
            self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: what was evicted can't be brought back."""
        raise UserError(
            "Assisted decoding takes tokens back, and a StreamCache cannot; call generate without assistant_model and "
            "prompt_lookup_num_tokens."
        )

    activate_past_recording = crop
