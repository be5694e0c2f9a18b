"""Families whose attention modules compute attention themselves: what such a module does while a model works for us.

The code of other families asks `transformers` for an attention by name and so gets ours. Each function here stands in
for the `forward` of one module, with the module's own projections, and asks for ours by its name in between. There is
no dropout: a stream is for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from streamh2o.cache.families import kv_heads
from streamh2o.errors import UserError
from streamh2o.stream.model_pass import Pass

Output = tuple[Tensor, None]  # [batch, n, hidden_size], and no attention weights


def own_forward(module: nn.Module) -> Callable[..., Output] | None:
    """What stands in for `module.forward`; None where the module is none of these families' in `transformers`.

    Raises UserError where something else, such as accelerate, has given the module another forward already.
    """
    forward = _known(module)
    if forward is None:
        return None
    if "forward" in module.__dict__:
        raise UserError(
            f"The {type(module).__name__} of this model has a forward that is not its own, as --device-map gives it, "
            "and can't be run that way; use one device."
        )
    return partial(_ours_or_own, forward, module)


def _ours_or_own(forward: Callable[..., Output], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call in another thread, which began before the model was lent, gets what the module's own code gives."""
    if any(isinstance(argument, Pass) for argument in (*args, *kwargs.values())):
        return forward(module, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def has_own_attention(model: nn.Module) -> bool:
    """Whether there is anything in `model` that `own_forward` knows: not in code that a model brings along."""
    return any(_known(module) is not None for module in model.modules())


def _known(module: nn.Module) -> Callable[..., Output] | None:
    kind = type(module)
    return _FORWARDS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def attend(module: Any, parts: tuple[Tensor, Tensor, Tensor], cache: Any, scaling: float) -> Tensor:
    """Our attention of queries, keys and values, each [batch, heads, n, head_dim]: [batch, n, heads * head_dim]."""
    assert isinstance(cache, Pass)
    query, key, value = parts
    cache.update(key, value, module.layer_idx)
    return cache.attend(query, scaling, None, None).transpose(1, 2).flatten(2)


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, layer_past: Any = None, **kwargs: Any) -> Output:
    parts = module._reshape(module.query_key_value(hidden_states))
    return module.dense(attend(module, parts, layer_past, module.inv_norm_factor)) + residual, None


def _falcon(module: Any, hidden_states: Tensor, alibi: Tensor | None, layer_past: Any = None, **kwargs: Any) -> Output:
    """One layout for all of its architectures: for each KV head its queries, its key, its value."""
    heads = kv_heads(module.config)
    mixed = module.query_key_value(hidden_states).unflatten(2, (heads, -1, module.head_dim)).transpose(1, 2)
    query = mixed[:, :, :, :-2].transpose(2, 3).flatten(1, 2)
    key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
    if alibi is None:  # the rotation by position zero: what cosines are scaled by
        scale = kwargs["position_embeddings"][0][:, None]
        query, key = query * scale, key * scale
    return module.dense(attend(module, (query, key, value), layer_past, module.inv_norm_factor)), None


def _mpt(module: Any, hidden_states: Tensor, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Output:
    """past_key_values: the cache, as releases of `transformers` before 5.23 call it."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = mixed.unflatten(2, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    cache = past_key_values if cache is None else cache
    return module.out_proj(attend(module, (query, key, value), cache, module.softmax_scale)), None


_FORWARDS: dict[str, Callable[..., Output]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "FalconFlashAttention2": _falcon,
    "MptAttention": _mpt,
}
