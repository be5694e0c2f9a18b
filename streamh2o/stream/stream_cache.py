"""The cache for `model.generate`: fixed size, for as many tokens as one likes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.decoding_cache import DecodingCache
from streamh2o.cache.families import positions_for
from streamh2o.cache.rotary import Rotary
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import Kernel
from streamh2o.policies import Policy, make_policy
from streamh2o.stream.given_model import ModelAndTokenizer, kernel_for, model_and_tokenizer, require_weights
from streamh2o.stream.guard import Forward
from streamh2o.stream.lending import CallCache, Lending, lending_of
from streamh2o.stream.model_pass import Pass
from streamh2o.stream.prompt_pieces import PieceStates, PromptPiece, cut_input, first_columns
from streamh2o.stream.stream_cache_checks import refuse_another_text, refuse_call, require_decoding
from streamh2o.stream.stream_cache_file import described, is_saved_policy, read_cache, write_cache

_OURS = ("attention_mask", "position_ids", "cache_position")  # arguments that the cache sees to
EVICT_EVERY = 32  # decode steps; docs/notebook/speed.md has the measurement


class StreamCache(CallCache):
    """What `model.generate(..., past_key_values=cache)` takes in place of the cache that grows. Made by `for_model`.

    The rows of a batch stand side by side while they have the same length, else (left padding) each has slots of its
    own, so that a row gets what it would get alone and padding takes no slot.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        rotary: Rotary,
        chunk: int,
        evict_every: int,
        kernel: Kernel,
        engine: bool,
    ) -> None:
        self.layers = []  # what a cache of transformers is made of; ours are in `groups`
        self.policy, self.rotary, self.chunk, self.evict_every = policy, rotary, chunk, evict_every
        self.kernel, self.engine = kernel, engine
        self.layers_count: int = model.config.get_text_config().num_hidden_layers
        self.groups: list[DecodingCache] = []  # of consecutive rows of the batch, each with slots of its own
        self.tokens = 0  # columns of the batch that went through, padding included
        self.wanted = 0
        self._whole = True  # every call came to its end; else the text has a hole
        self._model = weakref.ref(model)
        self._lending = lending_of(model)
        self._leave = self._lending.use(self, model)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel | ModelAndTokenizer,
        cache: int = 1024,
        policy: str | Policy = "streamh2o",
        *,
        sinks: int | None = None,
        recent: int | None = None,
        hitters: int | None = None,
        chunk: int | None = None,
        evict_every: int = EVICT_EVERY,
        kernel: str | Kernel = "auto",
        engine: bool = True,
        **knobs: Any,
    ) -> StreamCache:
        """A cache of `cache` slots per layer and KV head for `model`, a causal model of `transformers`.

        policy: a name, whose budget is sinks + recent + hitters = cache, or a policy made by `make_policy` (then the
        other numbers are its own). knobs: the policy's further fields. chunk: most tokens of one pass; a longer prompt
        goes through in pieces (256, or what the trained length leaves). evict_every: decode steps between evictions, so
        that up to cache + evict_every slots are held while tokens come one by one.

        kernel: `auto` (that of `load_model`, or the best there is), `compiled`, `torch`, or one that was selected.
        engine: use faster modules during a pass.

        The model answers to this cache until `detach`, the end of a `with`, or the cache's own end; meanwhile it works
        as ever without it. Raises UsageError for settings that don't fit the model, UserError for a model that is not
        supported.
        """
        if "kv_bits" in knobs:
            raise UsageError("A StreamCache keeps keys and values as the model has them; kv_bits is for a Stream.")
        kernel = kernel_for(model, kernel)
        model, _ = model_and_tokenizer(model)
        require_decoding(model)
        require_weights(model)
        made = policy
        if isinstance(made, str):
            made = make_policy(made, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)
        trained = positions_for(model.config, made.cache + (chunk or 1))
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
        return cls(model, made, Rotary.from_model(model, trained), chunk, evict_every, kernel, engine)

    def detach(self) -> None:
        """Let go of the model. What was read stays, to look at; the model can't be called with this cache any more."""
        self._leave()

    def __enter__(self) -> StreamCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # What it holds

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first call."""
        return sum(group.rows_count for group in self.groups)

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

    # A call of the model

    def call(self, lending: Lending, own: Forward, decoder: nn.Module, name: str, kwargs: dict[str, Any]) -> Any:
        """What the decoder gives for `kwargs`, in passes of at most `chunk` tokens. own: its forward."""
        if lending is not self._lending or not self._leave.alive:
            raise UserError("This StreamCache was made for another model, or was detached; make one for this model.")
        if not self._whole:
            raise UserError(
                "The last call with this StreamCache was cut off where it can't be taken back; reset() it, or make "
                "another."
            )
        argument = "inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"
        refuse_call(decoder, argument, kwargs)
        inputs: Tensor = kwargs[argument]
        mask, longest = kwargs.get("attention_mask"), max((group.tokens for group in self.groups), default=0)
        refuse_another_text(self.tokens, longest, inputs, mask, kwargs.get("position_ids"))
        pieces = self._pieces(inputs, mask)
        if len(pieces) > 1 and kwargs.get("output_hidden_states"):
            raise UsageError(
                f"A StreamCache reads a prompt in pieces of {self.chunk} tokens and gives no output_hidden_states."
            )
        rest = {key: value for key, value in kwargs.items() if key not in (*_OURS, argument, name)}
        alone = len(pieces) == 1 and pieces[0].of(inputs).shape == inputs.shape
        states = PieceStates(inputs, self.wanted)
        self._whole = False
        for piece in pieces:
            part = piece.of(inputs)
            zeros = torch.zeros(part.shape[:2], dtype=torch.int64, device=part.device)
            running = self._new_pass(piece, part.shape[1])
            once = partial(own, **rest, **{argument: part, name: running, "position_ids": zeros})
            try:
                output = lending.run(running, partial(_run_to_end, running, once), self.engine)
            except BaseException:
                self._whole = len(pieces) == 1 and running.left_no_trace
                raise
            if not alone:
                states.add(piece, output)
        self.tokens += inputs.shape[1]
        self._whole = True
        output = _with_cache(output, running, self)
        return output if alone else states.in_place_of(output)

    def _pieces(self, inputs: Tensor, mask: Tensor | None) -> list[PromptPiece]:
        """`inputs` [batch, columns, ...] as passes, without padding.

        mask: [batch, columns so far and of the inputs], 0 for padding.
        """
        rows, columns = inputs.shape[:2]
        if self.groups and self.rows not in (0, rows):
            raise UserError(
                f"This StreamCache holds {self.rows} rows and was given {rows}; reset() it, or make another."
            )
        if mask is not None and mask.dim() != 2:
            raise UserError("A StreamCache takes attention masks of two dimensions, which tell the padding.")
        start = first_columns(None if mask is None else mask[:, -columns:].bool(), rows, self.tokens > 0)
        if not self.groups:
            self.groups = [self.new_group() for _ in range(rows if len(set(start)) > 1 else 1)]
        return cut_input(self.groups, start, columns, self.chunk)

    def new_group(self) -> DecodingCache:
        """An empty one."""
        return DecodingCache(
            self.policy, self.rotary, self.layers_count, self.chunk, self.evict_every, kernel=self.kernel
        )

    def _new_pass(self, piece: PromptPiece, count: int) -> Pass:
        for group in piece.groups:
            if not self.policy.evicts and group.tokens + count > self.policy.cache:
                raise UserError(
                    f"The text is longer than the {self.policy.cache} tokens that the policy {self.policy.name} may "
                    "keep; use a policy that evicts."
                )
        return Pass(piece.groups, count)

    # What `transformers` calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refused: a model that this cache is for is given a `Pass` in its place."""
        raise UserError(
            "This StreamCache does not belong to the model that was called with it, or was detached; make one with "
            "StreamCache.for_model(model)."
        )

    is_croppable = CallCache.is_compileable

    @property
    def is_initialized(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        return f"StreamCache(policy={self.policy}, slots={self.slots}, tokens={self.tokens})"

    # Copies and files

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamCache:
        """Another cache for the same model, which has read the same text."""
        copy = self._another()
        copy.groups = [group.rows(torch.arange(group.rows_count)) for group in self.groups]
        copy.tokens, copy._whole = self.tokens, self._whole
        return copy

    def _another(self) -> StreamCache:
        model = self._model()
        if model is None or not self._leave.alive:
            raise UserError("This StreamCache was detached from its model and can't be copied.")
        return StreamCache(model, self.policy, self.rotary, self.chunk, self.evict_every, self.kernel, self.engine)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserError(
            "A StreamCache can't be pickled; write it to a file with cache.save(path), read it with "
            "StreamCache.load(path, model), or copy it with copy.deepcopy."
        )

    def save(self, path: str | Path) -> None:
        """Write what the cache has read to the file `path`, as safetensors, for `load`.

        Raises UserError where a call was cut off, or where the file can't be written.
        """
        model = self._model()
        if model is None or not self._whole:
            raise UserError("This StreamCache has lost its model or a part of its text, and can't be saved.")
        settings: dict[str, Any] = described(self.policy)
        settings |= {"chunk": self.chunk, "evict_every": self.evict_every, "tokens": self.tokens}
        write_cache(Path(path), model, self.groups, settings)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel | ModelAndTokenizer,
        *,
        policy: Policy | None = None,
        kernel: str | Kernel = "auto",
        engine: bool = True,
    ) -> StreamCache:
        """The cache that `save` wrote, for the same model: it goes on with the same tokens.

        policy: the one it was made with, where that is not one that has a name. Raises UserError where the file is
        damaged, or of another model or policy.
        """
        tensors, settings = read_cache(Path(path), model_and_tokenizer(model)[0])
        if policy is None:
            policy = make_policy(settings["policy"], **settings["knobs"])
        elif not isinstance(policy, Policy) or not is_saved_policy(policy, settings):
            raise UserError(f"{path} was saved with the policy {settings['policy']} {settings['knobs']}, not {policy}.")
        how: dict[str, Any] = {"chunk": settings["chunk"], "evict_every": settings["evict_every"]}
        cache = cls.for_model(model, policy=policy, kernel=kernel, engine=engine, **how)
        try:
            cache._fill(tensors, settings)
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{path} is damaged, and can't be read.") from None
        return cache

    def _fill(self, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        for number, counts in enumerate(settings["groups"]):
            head = f"group{number}."
            group = self.new_group()
            group.load(
                {name.removeprefix(head): each for name, each in tensors.items() if name.startswith(head)}, counts
            )
            self.groups.append(group)
        self.tokens = settings["tokens"]

    def reset(self) -> None:
        """Forget the text, for another one."""
        self.groups, self.tokens, self._whole = [], 0, True

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


def _run_to_end(running: Pass, call: Callable[[], Any]) -> Any:
    output = call()
    running.finish()
    return output


def _with_cache(output: Any, running: Pass, cache: StreamCache) -> Any:
    """`output` of a decoder with `cache` where it names the pass."""
    if isinstance(output, tuple):
        return tuple(cache if each is running else each for each in output)
    for key in [key for key, value in output.items() if value is running]:
        output[key] = cache
    return output
