"""A decoder layer of Llama's kind in a few operations: what `fused.py` lets stand in for the layer's own code.

What such a layer of `transformers` does in Python between its products takes a good part of a short pass. Here the
layer is a straight line of what stands in for its modules, with each residual added where a product is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import AttentionInterface

from streamh2o.stream.model_pass import Pass
from streamh2o.stream.own_attention import attend

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PASSED = {"dropout", "scaling", "use_cache"}  # what a layer's own code may tell its attention, beside Nones
_TRIAL = "streamh2o-trial"  # the name of the attention that hears of it

Parts = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, each [batch, heads, n, head_dim]


def is_known(module: nn.Module) -> bool:
    """Whether a layer has the parts of one of Llama's kind and no others; what it makes of them is for a trial."""
    if {name for name, _ in module.named_children()} != _CHILDREN:
        return False
    attention: Any = module.self_attn
    if {name for name, _ in attention.named_children()} != set(PROJECTIONS):
        return False
    return all(hasattr(attention, name) for name in ("head_dim", "scaling", "layer_idx"))


def hooked(module: nn.Module) -> bool:
    """Whether somebody has hooks on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class FusedLayer:
    """`module.forward`, as far as a cache of ours is given; else the module's own.

    norms: stand in for the two norms. projections: for the linear layers of `PROJECTIONS`, the last of which takes a
    residual to add. gated: for what comes before the last linear layer of the gate. down: for that, with a residual.
    """

    def __init__(
        self,
        module: Any,
        norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
        projections: tuple[Callable[..., Tensor], ...],
        gated: Callable[[Tensor], Tensor],
        down: Callable[..., Tensor],
    ) -> None:
        self._own = type(module).forward.__get__(module)
        self._attention = module.self_attn
        self._parts = [part for part in module.modules() if part is not module]
        self._norms, self._projections, self._gated, self._down = norms, projections, gated, down

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        other = args or not isinstance(cache, Pass) or kwargs.get("attention_mask") is not None
        if other or self.is_watched():
            result: Tensor = self._own(hidden_states, *args, **kwargs)
            return result
        return self._through(
            hidden_states, lambda parts: attend(self._attention, parts, cache, self._attention.scaling)
        )

    def is_watched(self) -> bool:
        """Whether somebody has hooks on a part of the layer, or on all modules, which would not be called."""
        return bool(_global_forward_hooks or _global_forward_pre_hooks) or any(map(hooked, self._parts))

    def is_patched(self) -> bool:
        """Whether a part of the layer has a forward that is not its own."""
        return any("forward" in part.__dict__ for part in self._parts)

    def agrees(self, same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether it gives, by plain attention over a random input, what the module gives, which rotates by zero."""
        weight = self._attention.q_proj.weight
        x = torch.randn(1, 16, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        angles = torch.ones(1, 16, self._attention.head_dim, dtype=weight.dtype)
        config = self._attention.config
        passed: dict[str, Any] = {}

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
            passed.update(kwargs)
            return self._plain((query, key, value)).unflatten(2, (query.shape[1], -1)), None

        AttentionInterface.register(_TRIAL, attention)
        ours, config._attn_implementation = config._attn_implementation, _TRIAL
        try:
            expected = self._own(x, position_embeddings=(angles, torch.zeros_like(angles)))
            found = self._through(x, self._plain)
        except Exception:  # it is not called so, or mixes number formats: whatever a family's own code may say
            return False
        finally:
            config._attn_implementation = ours
        more = set(passed) - _PASSED
        if passed.get("scaling") != self._attention.scaling or any(passed[name] is not None for name in more):
            return False
        return isinstance(expected, Tensor) and same(expected, found)

    def _through(self, x: Tensor, attention: Callable[[Parts], Tensor]) -> Tensor:
        """x [batch, n, hidden_size] through the layer; `attention` gives [batch, n, heads * head_dim]."""
        *inward, outward = self._projections
        heads = (*x.shape[:-1], -1, self._attention.head_dim)
        normed = self._norms[0](x)
        query, key, value = (project(normed).view(heads).transpose(1, 2) for project in inward)
        x = outward(attention((query, key, value)), x)
        return self._down(self._gated(self._norms[1](x)), x)

    def _plain(self, parts: Parts) -> Tensor:
        scaling = self._attention.scaling
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)
