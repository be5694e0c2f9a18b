"""Whether the cache fits into the memory that is free, known before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from streamh2o.cache.families import kv_heads
from streamh2o.cache.quantised_slots import packed_bytes, packed_slots
from streamh2o.errors import UserError
from streamh2o.machine import available_bytes
from streamh2o.policies import Policy

_SCORE_AND_INDEX = 4 + 8  # bytes a slot: float32 and int64


def slot_bytes(model: PreTrainedModel, copies: int = 1) -> tuple[int, int, int]:
    """Layers, KV heads (times `copies`), and bytes of one slot of one of them: key, value, score, source index."""
    config: Any = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 2 * head_dim * torch.empty((), dtype=model.dtype).element_size() + _SCORE_AND_INDEX
    return config.num_hidden_layers, kv_heads(config) * copies, size


def _saved_bytes(model: PreTrainedModel, slots: int, packed: int, kv_bits: int) -> int:
    """What one head of all layers takes less where so many of its slots are packed, but for one layer at full width."""
    if kv_bits == 16:
        return 0
    layers, _, size = slot_bytes(model)
    whole = size - _SCORE_AND_INDEX
    head_dim = whole // (2 * torch.empty((), dtype=model.dtype).element_size())
    at_full_width = whole * slots + 4 * head_dim * packed  # and its keys or values in float32 on the way
    return layers * packed * (whole - 2 * packed_bytes(head_dim, kv_bits)) - at_full_width


def require_memory(
    model: PreTrainedModel, policy: Policy, chunk: int, copies: int = 1, kv_bits: int = 16, batch: int = 1
) -> None:
    """Raise UserError, with the sum and what would fit, where `policy.cache` + `chunk` slots need more than is free.

    copies: slots for each KV head; batch: texts side by side.

    A policy that evicts nothing takes memory only as the text grows, so nothing is known of it beforehand.
    """
    if not policy.evicts:
        return
    devices = {
        torch.device(place) for place in (getattr(model, "hf_device_map", None) or {}).values() if place != "disk"
    }
    devices = devices or {model.device}
    each_free = [free_bytes(device) for device in devices]
    if None in each_free:
        return
    free = sum(part or 0 for part in each_free)
    layers, heads, size = slot_bytes(model, copies)
    each = batch * layers * heads * size
    slots, packed = policy.cache + chunk, packed_slots(policy)
    saved, less = (batch * heads * _saved_bytes(model, slots - n, packed - n, kv_bits) for n in (0, 1))
    need = slots * each - saved
    if need <= free:
        return
    fits = policy.cache - math.ceil((need - free) / (each - saved + less))
    hint = f"--cache {fits} would fit" if fits > policy.sinks else "use a smaller model or --chunk"
    texts = f"{batch} texts x " if batch > 1 else ""
    integers = f", less {_size(saved)} by --kv-bits {kv_bits}" if saved else ""
    raise UserError(
        f"--cache {policy.cache} and --chunk {chunk} need {_size(need)} ({texts}{layers} layers x "
        f"{heads} heads x {slots} slots x {size} bytes{integers}), and {_size(free)} of memory are free on "
        f"{_names(devices)}; {hint}."
    )


def _names(devices: set[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices)))


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_bytes()


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
