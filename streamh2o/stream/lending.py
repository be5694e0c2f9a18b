"""What a model of `transformers` is lent while one of our passes runs: our attention, and faster modules.

Between passes the model is its own. While a stream or a StreamCache is open, other calls of the model wait for a pass
that runs in another thread; they find the model as it was.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamh2o.cache.families import own_attention
from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import Kernel
from streamh2o.stream.engine.fused import Fused, fused, look_again
from streamh2o.stream.guard import Forward, Guard, and_back, set_forward, unset_forward
from streamh2o.stream.lm_head import FewRows
from streamh2o.stream.model_cache import ModelCache
from streamh2o.stream.model_pass import Pass
from streamh2o.stream.own_attention import has_own_attention, own_forward

NAME = "streamh2o"  # of our attention among those of transformers
_CACHE_NAMES = ("cache", "past_key_values")  # the argument's name from transformers 5.23 on, and before
_UNKNOWN = ("s_aux", "position_bias", "alibi", "head_mask")  # what would change the result and is not dealt with

_lendings: weakref.WeakKeyDictionary[nn.Module, Lending] = weakref.WeakKeyDictionary()  # by decoder
_by_module: weakref.WeakKeyDictionary[nn.Module, Lending] = weakref.WeakKeyDictionary()  # by a part of a decoder
_registering = threading.Lock()


class CallCache(ModelCache):
    """A cache that users give to a model, and that makes one call of the decoder into passes."""

    kernel: Kernel
    wanted: int  # newest hidden states that the call at hand is for; 0 for all

    @abstractmethod
    def call(self, lending: Lending, own: Forward, decoder: nn.Module, name: str, kwargs: dict[str, Any]) -> Any:
        """What `own`, the decoder's forward, gives for `kwargs`, among which this cache is called `name`."""


def cache_argument(model: PreTrainedModel) -> str:
    """How this release of transformers calls the cache: `cache` from 5.23 on, `past_key_values` before."""
    newer, older = _CACHE_NAMES
    return newer if newer in inspect.signature(model.get_decoder().forward).parameters else older


def lending_of(model: PreTrainedModel) -> Lending:
    """The lending of this model's decoder. Raises UserError where the model lets no other attention be chosen."""
    decoder = model.get_decoder()
    with _registering:
        if decoder not in _lendings:
            sharing = (lending for _, lending in _known() if lending.is_for(decoder.config))
            made = _lendings[decoder] = Lending(decoder, next(sharing, None))
            try:
                with made.lock:
                    _require_choice(model)
            except BaseException:
                del _lendings[decoder]
                raise
        return _lendings[decoder]


def _require_choice(model: PreTrainedModel) -> None:
    if own_attention(model.config):
        ours = has_own_attention(model)
    else:
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        ours = model.config._attn_implementation == NAME
        model.set_attn_implementation(before)
    if not ours:
        raise UserError(
            f"{type(model).__name__} computes attention itself in the installed transformers and lets no other be "
            "chosen, so it cannot be run; a newer transformers may."
        )


class Lending:
    """The one owner of what a decoder is lent.

    sharing: that of another decoder with the same configuration object, where there is one: the name of the attention
    stands there, so that only one of the two may be lent ours at a time.
    lock: held by whoever runs the model: a pass, or a call from elsewhere. running: the pass under way.

    A call from elsewhere that had begun before there was a guard does not wait. It is known by its thread: whatever it
    meets that is lent does for it what the model's own does.
    """

    def __init__(self, decoder: nn.Module, sharing: Lending | None = None) -> None:
        self.lock = threading.RLock()
        if sharing is not None:
            self.lock = sharing.lock
        self.running: Pass | None = None
        self._thread = 0  # that `running` runs in
        config: Any = decoder.config
        self._attention: str = config._attn_implementation if sharing is None else sharing._attention  # the model's own
        self._faster: Fused | None = None
        self._decoder = weakref.ref(decoder)
        self._users: list[None] = []  # one entry each, since a list grows and shrinks in one step
        self._guards: list[tuple[weakref.ref[nn.Module], Guard]] = []
        # What stands in for the attention of families that compute it in code of their own.
        found = ((module, own_forward(module)) for module in decoder.modules())
        self._own_forwards = [(weakref.ref(module), forward) for module, forward in found if forward is not None]

    def use(self, user: object, model: PreTrainedModel) -> weakref.finalize[..., Any]:
        """Let `user` run passes until what this returns is called, or until the user is garbage.

        From the first user to the last, calls of the decoder and of `model` go through a guard.
        """
        with self.lock:
            self._users.append(None)
            decoder = self._decoder()
            if decoder is not None:
                look_again(decoder)
                self._guard(decoder, self._call_decoder)
            if model is not decoder:
                self._guard(model, self._call_model)
        leave = weakref.finalize(user, self._leave)
        leave.atexit = False
        return leave

    def _guard(self, module: nn.Module, call: Callable[..., Any]) -> None:
        if not any(reference() is module for reference, _ in self._guards):
            guard = Guard(module, call)
            module.__dict__["forward"] = guard
            self._guards.append((weakref.ref(module), guard))

    def _leave(self) -> None:
        """A user has gone. The garbage collector may say so anywhere in any thread, so nothing is waited for here."""
        self._users.pop()
        if self.lock.acquire(blocking=False):
            try:
                self._unguard()
            finally:
                self.lock.release()

    def _unguard(self) -> None:
        """Take the guards away where nobody uses them any more."""
        if self._users:
            return
        for reference, guard in self._guards:
            module = reference()
            if module is not None and module.__dict__.get("forward") is guard:
                guard.remove(module)
        self._guards = []

    def run(self, running: Pass, call: Callable[[], Any], engine: bool = True) -> Any:
        """What `call`, which is the pass `running`, gives while the decoder is lent our attention.

        engine: lend faster modules too. Where it fails, the slots of the pass are taken back.
        """

        def lent() -> Any:
            try:
                running.begin()
                self._lend(running, engine)
                return call()
            except BaseException:
                running.undo()
                raise

        with self.lock:
            return and_back(lent, self._give_back)

    def _lend(self, running: Pass, engine: bool) -> None:
        decoder: Any = self._decoder()
        if decoder.training:
            raise UsageError("The model is in training mode, where dropout makes results random; call model.eval().")
        kernel = running.caches[0].kernel
        self._attention = decoder.config._attn_implementation
        self._faster = fused(decoder, kernel) if engine and kernel.types else None
        self._thread, self.running = threading.get_ident(), running
        if not own_attention(decoder.config):
            decoder.config._attn_implementation = NAME
        for reference, forward in self._own_forwards:
            set_forward(reference(), forward)
        if self._faster is not None:
            self._faster.on()

    def _give_back(self) -> None:
        """The decoder is its own again. Can be called at any point of `_lend` and of itself."""
        self.running = None
        decoder: Any = self._decoder()
        if decoder.config._attn_implementation == NAME:
            decoder.config._attn_implementation = self._attention
        if self._faster is not None:
            self._faster.off()
        for reference, forward in self._own_forwards:
            unset_forward(reference(), forward)

    def is_for(self, config: Any) -> bool:
        decoder: Any = self._decoder()
        return decoder is not None and decoder.config is config

    def pass_here(self) -> Pass | None:
        """The pass that runs in this thread."""
        return self.running if self._thread == threading.get_ident() else None

    def own_attention(self, module: nn.Module) -> Callable[..., Any]:
        """The attention that the model has when nothing is lent."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        own: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(self._attention, eager)
        return own

    def own_mask(self) -> Callable[..., Any]:
        own: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[self._attention]
        return own

    def _call_decoder(self, decoder: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the decoder: by one of our passes, with a cache of ours that makes passes of it, or any other."""
        with self.lock:
            self._unguard()
            if self.pass_here() is not None:
                return own(*args, **kwargs)
            if args:
                kwargs = {**dict(zip(inspect.signature(own).parameters, args, strict=False)), **kwargs}
            name, cache = _find(kwargs)
            if cache is None:
                return own(**kwargs)
            return cache.call(self, own, decoder, name, kwargs)

    def _call_model(self, model: Any, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the whole model: its decoder and its output embedding."""
        with self.lock:
            self._unguard()
            _, cache = _find(kwargs)
            if cache is None or self.pass_here() is not None:
                return own(*args, **kwargs)
            wanted = kwargs.get("logits_to_keep", 0)  # which the decoder is not given
            cache.wanted = wanted if isinstance(wanted, int) else 0
            few = FewRows(model, cache.kernel)

            def lent() -> Any:
                few.on()
                return own(*args, **kwargs)

            def back() -> None:
                few.off()
                cache.wanted = 0

            return and_back(lent, back)


def _find(kwargs: dict[str, Any]) -> tuple[str, CallCache | None]:
    """The cache of ours among the arguments of a call, and what it is called there."""
    for name in _CACHE_NAMES:
        if isinstance(kwargs.get(name), CallCache):
            return name, kwargs[name]
    return "", None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls in place of its own attention, right after `Pass.update` of the same layer."""
    lending = _by_module.get(module) or _look_up(module)
    if lending is None:
        raise UsageError(f"The attention called {NAME!r} is for streams of streamh2o; choose another for plain calls.")
    running = lending.pass_here()
    if running is None:
        own = lending.own_attention(module)
        rest = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        given = {name: value for name, value in rest.items() if value is not None}
        output: tuple[Tensor, None] = own(module, query, key, value, attention_mask, **given, **kwargs)
        return output
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} gives its attention '{name}', which streamh2o does not know.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return running.attend(query, scaling, sliding_window, softcap).transpose(1, 2), None


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """What `transformers` calls for the mask: none is needed for a pass."""
    for _, lending in _known():
        if lending.is_for(kwargs.get("config")) and lending.pass_here() is None:
            return lending.own_mask()(*args, **kwargs)
    return None


def _known() -> list[tuple[nn.Module, Lending]]:
    """All decoders and their lendings, though other threads may add some meanwhile."""
    decoders = [decoder for reference in _lendings.keyrefs() if (decoder := reference()) is not None]
    return [(decoder, _lendings[decoder]) for decoder in decoders]


def _look_up(module: nn.Module) -> Lending | None:
    """The lending of the decoder that `module` is a part of, or whose configuration it has."""
    for decoder, lending in _known():
        if any(part is module for part in decoder.modules()):
            _by_module[module] = lending
            return lending
    config = getattr(module, "config", None)  # of a model that is not lent, but has the configuration of one that is
    return next((lending for _, lending in _known() if lending.is_for(config)), None)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
