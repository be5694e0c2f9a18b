"""How a model takes a StreamCache: hooks of PyTorch, which leave with the last cache that needs them.

Only calls that are given a StreamCache are touched. For those the attention is ours while the call lasts, positions are
zero, which makes the model's own rotation the identity, a prompt goes through in pieces, and left padding stays out.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamh2o.cache.families import own_attention
from streamh2o.errors import UsageError, UserError
from streamh2o.stream.attach import NAME, attach, detach
from streamh2o.stream.engine.fused import Fused, fused
from streamh2o.stream.lm_head import FewRows

if TYPE_CHECKING:
    from streamh2o.stream.stream_cache import Piece, StreamCache

_CACHE = ("cache", "past_key_values")  # the argument's name from transformers 5.23 on, and before
_OURS = ("attention_mask", "position_ids", "cache_position")  # arguments that the cache sees to


@dataclass
class _Hooked:
    """What is known of a model with hooks.

    names: of the decoder's arguments, in their order. head: what reads the model's output embedding. caches: how many
    need the hooks. running: the call under way, or one that a Ctrl-C cut off.
    """

    handles: list[Any]
    names: list[str]
    head: FewRows
    caches: int = 1
    running: _Call | None = None


_hooked: weakref.WeakKeyDictionary[nn.Module, _Hooked] = weakref.WeakKeyDictionary()  # by decoder


def hook(model: PreTrainedModel) -> None:
    """Let calls of `model` that are given a StreamCache work, until `unhook`; calls nest.

    Raises UsageError for a compiled model, UserError where the attention of the model can't be chosen.
    """
    decoder: Any = model.get_decoder()
    if decoder in _hooked:
        _hooked[decoder].caches += 1
        return
    if any(getattr(each, "_compiled_call_impl", None) is not None for each in (model, decoder)):
        raise UsageError("The model is compiled, and a StreamCache can't be; use the model as it was before.")
    attach(model)  # raises where it can't
    detach(model)
    head = FewRows(model)
    handles = [
        decoder.register_forward_pre_hook(_before, with_kwargs=True),
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True),
    ]
    if decoder is not model:
        handles.append(model.register_forward_pre_hook(_begin_model, with_kwargs=True))
        handles.append(model.register_forward_hook(_end_model, always_call=True))
    _hooked[decoder] = _Hooked(handles, list(inspect.signature(decoder.forward).parameters), head)


def unhook(reference: weakref.ref[Any]) -> None:
    """Take back one `hook` of the decoder; with the last one the model is as it was."""
    decoder = reference()
    if decoder is None or decoder not in _hooked:
        return
    hooked = _hooked[decoder]
    hooked.caches -= 1
    if hooked.caches == 0:
        if hooked.running is not None:
            hooked.running.end(finished=False)
        del _hooked[decoder]
        for handle in hooked.handles:
            handle.remove()
        hooked.head.off()


class _Call:
    """One call of a decoder with a StreamCache: all pieces of its input but the last are passes of their own."""

    def __init__(self, decoder: Any, cache: StreamCache, name: str, kwargs: dict[str, Any]) -> None:
        inputs: Tensor = kwargs[name]
        self.decoder, self.cache, self.name, self.inputs = decoder, cache, name, inputs
        self.rest = {key: value for key, value in kwargs.items() if key not in _OURS and key != name}
        *self.first_pieces, self.last_piece = cache.pieces(inputs, kwargs.get("attention_mask"))
        self.first_column = max(0, inputs.shape[1] - cache.wanted) if cache.wanted else 0  # whose state is wanted
        self.states: Tensor | None = None  # [batch, columns from `first_column` on, hidden], where there are pieces
        self.attention = decoder.config._attn_implementation
        if not own_attention(decoder.config):
            decoder.config._attn_implementation = NAME
        self.fused: Fused = fused(decoder)
        self.fused.on()

    def run_first(self) -> dict[str, Any]:
        """All pieces but the last; returns the arguments for that one."""
        for piece in self.first_pieces:
            arguments = self._arguments(piece)
            self.cache.inside = True
            try:
                self.keep(piece, self.decoder(**arguments).last_hidden_state)
                self.cache.finish(piece.end - piece.start)
            finally:
                self.cache.inside = False
        return self._arguments(self.last_piece)

    def _arguments(self, piece: Piece) -> dict[str, Any]:
        self.cache.begin(piece.groups, piece.end - piece.start)
        inputs = piece.of(self.inputs)
        zeros = torch.zeros(inputs.shape[:2], dtype=torch.int64, device=inputs.device)
        return {**self.rest, self.name: inputs, "position_ids": zeros}

    def keep(self, piece: Piece, states: Tensor) -> None:
        """Put the hidden states of a piece, as far as they are wanted, in their place."""
        rows, columns = self.inputs.shape[:2]
        if self.states is None:
            self.states = states.new_zeros(rows, columns - self.first_column, states.shape[-1])
        start = max(piece.start, self.first_column)
        if start < piece.end:
            target = self.states if piece.row is None else self.states[piece.row : piece.row + 1]
            part = slice(start - self.first_column, piece.end - self.first_column)
            target[:, part] = states[:, start - piece.start :]

    def end(self, finished: bool) -> None:
        """Give the model its own attention back. finished: False where the call failed."""
        self.decoder.config._attn_implementation = self.attention
        self.fused.off()
        if finished:
            self.cache.finish(self.last_piece.end - self.last_piece.start)
            self.cache.tokens += self.inputs.shape[1]
        else:
            self.cache.undo()
            self.cache.cut = bool(self.first_pieces)


def _find(kwargs: dict[str, Any]) -> StreamCache | None:
    from streamh2o.stream.stream_cache import StreamCache

    for name in _CACHE:
        cache = kwargs.get(name)
        if isinstance(cache, StreamCache):
            return cache
    return None


def _begin_model(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note how many hidden states the model's head is going to use, which its decoder isn't told."""
    cache, hooked = _find(kwargs), _hooked.get(model.get_decoder())
    if hooked is None:
        return
    hooked.head.off()  # should a Ctrl-C have cut off the call before
    if cache is not None:
        wanted = kwargs.get("logits_to_keep", 0)
        cache.wanted = wanted if isinstance(wanted, int) else 0
        hooked.head.on()


def _end_model(model: Any, args: Any, output: Any) -> None:
    hooked = _hooked.get(model.get_decoder())
    if hooked is not None:
        hooked.head.off()


def _before(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run all pieces of the input but the last, and give the arguments for that one."""
    hooked = _hooked.get(decoder)
    if args and hooked is not None:
        kwargs = {**dict(zip(hooked.names, args, strict=False)), **kwargs}
    cache = _find(kwargs)
    if cache is not None and cache.inside:
        return None
    if hooked is not None and hooked.running is not None:
        hooked.running.end(finished=False)
        hooked.running = None
    if cache is None:
        return None
    if hooked is None or not cache.belongs_to(decoder):
        raise UserError("This StreamCache was made for another model, or was detached; make one for this model.")
    name = "inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"
    _refuse(decoder, kwargs, name)
    hooked.running = call = _Call(decoder, cache, name, kwargs)
    try:
        if call.first_pieces and kwargs.get("output_hidden_states"):
            raise UsageError(
                f"A StreamCache reads a prompt in pieces of {cache.chunk} tokens and gives no output_hidden_states."
            )
        return (), call.run_first()
    except BaseException:
        call.end(finished=False)
        hooked.running = None
        raise


def _after(decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """End the call, which has failed where there is no output; put the hidden states of its pieces together."""
    hooked = _hooked.get(decoder)
    call = None if hooked is None else hooked.running
    if hooked is None or call is None or call.cache.inside:
        return None
    hooked.running = None
    call.end(finished=output is not None)
    if output is None or (not call.first_pieces and call.last_piece.row is None and call.last_piece.start == 0):
        return None
    if isinstance(output, tuple):
        call.keep(call.last_piece, output[0])
        return (call.states, *output[1:])
    call.keep(call.last_piece, output.last_hidden_state)
    output.last_hidden_state = call.states
    return output


def _refuse(decoder: nn.Module, kwargs: dict[str, Any], name: str) -> None:
    """Raise UsageError for what a StreamCache can't do."""
    if kwargs.get(name) is None:
        raise UsageError("The model was called without input_ids.")
    if kwargs.get("use_cache") is False:
        raise UsageError(
            "use_cache=False, which some models have in their configuration, and a StreamCache contradict each other; "
            "say use_cache=True."
        )
    if kwargs.get("output_attentions"):
        raise UsageError("A StreamCache gives no attention weights; leave output_attentions out.")
    if torch.compiler.is_compiling():
        raise UsageError("A StreamCache can't be compiled; use the model as it was before torch.compile.")
    if torch.is_grad_enabled() and next(decoder.parameters()).requires_grad:
        raise UsageError("A StreamCache is for inference; call the model inside torch.no_grad().")
