"""The CPU engine: faster stand-ins for a model's modules, off or on as a whole.

A norm of `transformers` is seven passes over its input and a gate three: each becomes one operation of the kernel. In
bfloat16 a linear layer lays its weights out anew for every product: that is done once, where memory allows, and a gate
is made of the products with both its weights before they are written. Only modules that give the same as before are
touched, each by an attribute of its own that `off` takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from streamh2o.kernels import compiled
from streamh2o.kernels.gguf_linear import GgufLinear
from streamh2o.kernels.select import Kernel
from streamh2o.kernels.weight_copies import WeightCopy, spare
from streamh2o.stream.engine.fused_layer import PROJECTIONS, FusedLayer, hooked, is_known

Forward = Callable[..., Any]

_LINEAR = (nn.Linear, GgufLinear)
_WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of the largest number; bfloat16 has 8 bits


class Fused:
    """The modules of one model that something faster stands in for, from `on` to `off`."""

    def __init__(self, model: nn.Module, kernel: Kernel) -> None:
        self._forwards: list[tuple[nn.Module, Forward]] = []
        with torch.no_grad():
            self._forwards += _agreeing(_linear_layers(model, kernel))
            self._forwards += _agreeing(_norms_and_gates(model, dict(self._forwards), kernel))
            self._layers = _layers(model, dict(self._forwards)) if _zero_is_identity(model) else []
        self._on: list[tuple[nn.Module, Forward]] = []  # what `off` has to take away
        of_module = [(module, names) for module in model.modules() for names in (module._modules, module._parameters)]
        self._standing = [(names, name, part) for _, names in of_module for name, part in names.items()]

    def stands(self) -> bool:
        """Whether the model still has the modules and parameters that it was made for."""
        return all(names.get(name) is part for names, name, part in self._standing)

    def on(self) -> None:
        """The modules work as one operation each, and layers do not rotate: positions must be zero until `off`.

        A module that somebody has given another forward meanwhile, or a layer with such a part, keeps it.
        """
        whole: list[tuple[nn.Module, Forward]] = [
            (module, layer) for module, layer in self._layers if not layer.is_watched() and not layer.is_patched()
        ]
        self._on = [(module, own) for module, own in [*self._forwards, *whole] if "forward" not in module.__dict__]
        for module, forward in self._on:
            if isinstance(forward, _Linear):
                forward.refresh()
            module.__dict__["forward"] = forward

    def look_again(self) -> None:
        """Have weights laid out again at the next `on` where their numbers are others; see `WeightCopy`."""
        for _, forward in self._forwards:
            if isinstance(forward, _Linear):
                forward.look_again()

    def off(self) -> None:
        """The modules work as they did before `on`."""
        for module, forward in self._on:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        self._on = []


_made: WeakKeyDictionary[nn.Module, tuple[Any, Fused]] = WeakKeyDictionary()


def fused(decoder: nn.Module, kernel: Kernel) -> Fused:
    """The one of this decoder, made anew where its parts, their numbers, its place or the kernel have changed."""
    weight = next(decoder.parameters())
    state = kernel, weight.dtype, weight.device
    if decoder not in _made or _made[decoder][0] != state or not _made[decoder][1].stands():
        _made[decoder] = state, Fused(decoder, kernel)
    return _made[decoder][1]


def look_again(decoder: nn.Module) -> None:
    """Before passes of a new stream: see whether the weights of `decoder` are still those that were laid out."""
    if decoder in _made:
        _made[decoder][1].look_again()


Candidate = tuple[nn.Module, Forward, tuple[Any, ...]]  # a module, what may stand in, what modules that are alike share


def _agreeing(candidates: Iterator[Candidate]) -> Iterator[tuple[nn.Module, Forward]]:
    """Those that give on a random input what the module gives; of modules that are alike the first is asked."""
    judged: dict[tuple[Any, ...], bool] = {}
    for module, forward, alike in candidates:
        if alike not in judged:
            like = _input_of(module)
            x = torch.randn(1, 40, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.dtype)
            judged[alike] = all(_same(module(rows), forward(rows)) for rows in (x, x[:, :3]))
        if judged[alike]:
            yield module, forward


def _same(expected: Tensor, given: Tensor) -> bool:
    """Whether they differ by rounding only."""
    return bool(
        (given.float() - expected.float()).abs().max() <= _WITHIN[expected.dtype] * expected.float().abs().max()
    )


def _input_of(module: Any) -> Tensor:
    """No rows of what a norm, a linear layer or a gate is for: [0, width], in its number format, where it is."""
    first = getattr(module, "gate_proj", module)
    if isinstance(first, GgufLinear):
        return torch.empty(0, first.in_features, dtype=first.dtype, device=first.blocks.device)
    return first.weight.new_empty(0, first.weight.shape[-1])


def _own(model: nn.Module) -> Iterator[Any]:
    """The modules that nobody else, such as accelerate, has given another forward."""
    return (module for module in model.modules() if "forward" not in module.__dict__)


def _norms_and_gates(model: nn.Module, made: dict[nn.Module, Forward], kernel: Kernel) -> Iterator[Candidate]:
    """made: what stands in for linear layers."""
    for module in _own(model):
        if type(module).__name__.endswith("RMSNorm"):
            weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
            if isinstance(weight, Tensor) and isinstance(eps, float) and kernel.takes(weight):
                yield module, _norm(module, weight, eps), (type(module), weight.shape, weight.dtype, eps)
        elif all(isinstance(getattr(module, name, None), _LINEAR) for name in ("gate_proj", "up_proj", "down_proj")):
            like, out = _input_of(module), module.gate_proj.out_features
            if kernel.takes(like):
                yield module, _gated(module, made), (type(module), type(module.act_fn), like.shape, out, like.dtype)


def _norm(module: Any, weight: Tensor, eps: float) -> Forward:
    own = type(module).forward.__get__(module)  # for norms kept in another number format than what they are given
    return lambda x: compiled.rms_norm(x, weight, eps) if x.dtype == weight.dtype else own(x)


def _gated(module: Any, made: dict[nn.Module, Forward]) -> Forward:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    first, second = made.get(gate), made.get(up)
    if isinstance(first, _Linear) and isinstance(second, _Linear) and gate.bias is None and up.bias is None:
        return _Gated(module, first, second)
    return lambda x: down(compiled.gate(gate(x), up(x)))


class _Gated:
    """A gate made of the products with both its weights before they are written, and the linear layer behind it."""

    def __init__(self, module: Any, gate: _Linear, up: _Linear) -> None:
        self._gate, self._up, self._down = gate, up, module.down_proj
        self._layers = module.gate_proj, module.up_proj

    def inner(self, x: Tensor) -> Tensor:
        return compiled.gated_linear(x, self._gate.weight, self._up.weight, self._gate.features)

    def __call__(self, x: Tensor) -> Tensor:
        if any(hooked(layer) for layer in self._layers):
            inner = compiled.gate(*(layer(x) for layer in self._layers))
        else:
            inner = self.inner(x)
        result: Tensor = self._down(inner)
        return result


class _Linear:
    """A linear layer's product with its weights as the kernel wants them: the same, but for rounding."""

    def __init__(self, layer: nn.Linear) -> None:
        self._packed = WeightCopy(layer, compiled.pack_linear)
        self._bias, self.features = layer.bias, layer.out_features
        self.refresh()

    def refresh(self) -> None:
        """Lay the weights out again where they have changed."""
        self.weight = self._packed.weight

    def look_again(self) -> None:
        self._packed.look_again()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return compiled.linear(x, self.weight, self._bias, self.features, residual)


def _linear_layers(model: nn.Module, kernel: Kernel) -> Iterator[Candidate]:
    layers = [
        module
        for module in _own(model)
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16 and kernel.takes(module.weight)
        if module.in_features % 2 == 0 and module.weight.is_contiguous()
        if module.bias is None or module.bias.dtype == torch.bfloat16
    ]
    if not spare(sum(layer.weight.nbytes for layer in layers)):
        return
    for layer in layers:
        yield layer, _Linear(layer), (layer.weight.shape, layer.bias is None)


def _layers(model: nn.Module, made: dict[nn.Module, Forward]) -> list[tuple[nn.Module, FusedLayer]]:
    """The decoder layers all of whose parts something stands in for, and which are what they seem."""
    found: list[tuple[nn.Module, FusedLayer]] = []
    for module in _own(model):
        if not is_known(module):
            continue
        norms: Any = made.get(module.input_layernorm), made.get(module.post_attention_layernorm)
        projections: Any = tuple(made.get(getattr(module.self_attn, name)) for name in PROJECTIONS)
        gated = made.get(module.mlp)
        down: Any = made.get(module.mlp.down_proj) if isinstance(gated, _Gated) else None
        linear = all(isinstance(part, _Linear) for part in (*projections, down))
        if linear and isinstance(gated, _Gated) and None not in norms:
            layer = FusedLayer(module, norms, projections, gated.inner, down)
            if not layer.is_patched() and layer.agrees(_same):
                found.append((module, layer))
    return found


def _zero_is_identity(model: nn.Module) -> bool:
    """Whether the rotation by position zero leaves everything as it is, which YaRN and longrope scale."""
    modules = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    scales = [value for module in modules for name, value in vars(module).items() if name.endswith("attention_scaling")]
    return len(scales) > 0 and all(scale == 1.0 for scale in scales)
