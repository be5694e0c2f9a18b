"""Slots kept as integers of 8 or 4 bits, but for the sinks and the newest tokens, which stay as they are.

After KIVI (arXiv 2402.02750): values are quantised per token, and keys, which are un-rotated here, per channel: less
its mean, and divided by its spread, both those of the first pass that leaves keys to quantise. (KIVI's scales are
shared by 32 neighbouring tokens, which an eviction would tear apart.) Beside that a slot carries its own steps, for
keys that come to differ. An eviction moves integers: nothing is quantised twice.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from streamh2o.cache.slots import LayerSlots, MakeLayer
from streamh2o.errors import UsageError
from streamh2o.kernels.select import Kernel
from streamh2o.policies.base import Policy

BITS = (16, 8, 4)
GROUP = 64  # channels that share a scale, where so many divide the head's
WINDOW = 16  # newest slots of the recent window that stay as they are
_NARROWEST = 0.25  # of the mean spread of a head's channels: the least that one is taken for
_ROUNDING = 2**-8  # more than bfloat16 rounds off a step


def require_bits(bits: int, evict: str) -> None:
    """Raise UsageError where `bits` is no width, or where the cache evicts in a way that reads slots one by one."""
    if bits not in BITS:
        raise UsageError(f"--kv-bits is {bits}; it must be 16, 8 or 4.")
    if bits < 16 and evict == "token":
        raise UsageError(f"--kv-bits {bits} can't be read slot by slot as --evict token does; use --evict chunk.")


def slots_of(policy: Policy, bits: int) -> MakeLayer:
    """What makes the slots of a layer: those older than `WINDOW` at `bits` bits, where the policy has a budget."""
    if bits == 16 or not policy.evicts or policy.recomputes:
        return LayerSlots
    scratch = Scratch()
    return lambda key, value, capacity, kernel: QuantisedSlots(key, value, capacity, kernel, policy, bits, scratch)


def packed_slots(policy: Policy) -> int:
    """How many slots of a full cache are integers."""
    return policy.cache - policy.sinks - min(policy.recent, WINDOW)


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`x` [..., dim] as unsigned integers of 8 or 4 bits, by groups of channels from minus to plus their largest value.

    Returns codes [..., dim] uint8, or two in a byte [..., ceil(dim / 2)], and steps [..., groups] bfloat16. A value
    comes back within half a step, which is twice the largest of its group / (2**bits - 1), a little rounded up.
    """
    dim, levels = x.shape[-1], 2**bits - 1
    groups = x.float().unflatten(-1, (-1, math.gcd(dim, GROUP)))
    steps = (groups.abs().amax(-1) * ((1 + _ROUNDING) * 2 / levels)).clamp(min=1e-30).bfloat16()
    codes = (groups / steps.float().unsqueeze(-1)).add_(levels / 2).round_().clamp_(0, levels)
    packed = codes.flatten(-2).to(torch.uint8)
    if bits == 4:
        packed = functional.pad(packed, (0, dim % 2))
        low, high = packed.chunk(2, dim=-1)
        packed = low | (high << 4)
    return packed, steps


def packed_bytes(dim: int, bits: int) -> int:
    """What `quantise` makes of a row of so many channels: codes, and two bytes for the step of a group."""
    return math.ceil(dim * bits / 8) + 2 * (dim // math.gcd(dim, GROUP))


def dequantise(codes: Tensor, steps: Tensor, bits: int, dim: int) -> Tensor:
    """What `quantise` was given, [..., dim] float32, each value within half a step."""
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)[..., :dim]
    groups = codes.unflatten(-1, (steps.shape[-1], -1)).float()
    return groups.sub_((2**bits - 1) / 2).mul_(steps.float().unsqueeze(-1)).flatten(-2)


class QuantisedRows:
    """Quantised rows: codes [batch, kv_heads, rows, bytes] uint8, steps [batch, kv_heads, rows, groups] bfloat16.

    of: [batch, kv_heads, n, dim], what the rows will look like.
    """

    def __init__(self, of: Tensor, bits: int) -> None:
        self.bits, self.dim = bits, of.shape[-1]
        self.codes, self.steps = quantise(of[:, :, :1], bits)
        self.keep(torch.zeros(*of.shape[:2], 0, dtype=torch.int64, device=of.device))

    @property
    def rows(self) -> int:
        return self.codes.shape[2]

    @property
    def row_bytes(self) -> int:
        """Of one row of all heads."""
        return self.codes.shape[0] * self.codes.shape[1] * packed_bytes(self.dim, self.bits)

    def add(self, x: Tensor) -> None:
        codes, steps = quantise(x, self.bits)
        self.codes, self.steps = torch.cat([self.codes, codes], dim=2), torch.cat([self.steps, steps], dim=2)

    def keep(self, rows: Tensor) -> None:
        """Only `rows` [batch, kv_heads, kept] stay, as the integers they are."""
        self.codes, self.steps = (
            part.gather(2, rows[..., None].expand(-1, -1, -1, part.shape[-1])) for part in (self.codes, self.steps)
        )

    def read(self) -> Tensor:
        return dequantise(self.codes, self.steps, self.bits, self.dim)

    def load(self, codes: Tensor, steps: Tensor) -> None:
        """Raises ValueError where they are not rows of this kind."""
        for mine, other in ((self.codes, codes), (self.steps, steps)):
            if mine.dtype != other.dtype or (*mine.shape[:2], *mine.shape[3:]) != (*other.shape[:2], *other.shape[3:]):
                raise ValueError
        if codes.shape[2] != steps.shape[2]:
            raise ValueError
        self.codes, self.steps = codes.clone(), steps.clone()


class Scratch:
    """Room for the keys and values of one layer at full width, which all layers share. `holder`: whose they are now."""

    def __init__(self) -> None:
        self.holder: QuantisedSlots | None = None
        self.keys = self.values = torch.empty(0)

    def room(self, like: LayerSlots) -> tuple[Tensor, Tensor]:
        for name in ("keys", "values"):
            old, full = getattr(self, name), getattr(like, name)
            shape = (*full.shape[:2], like.capacity, full.shape[3])
            if old.shape != shape:
                with torch.inference_mode(False):  # else it could not be written outside it
                    setattr(self, name, full.new_empty(shape))
                self.holder = None
        return self.keys, self.values


class QuantisedSlots(LayerSlots):
    """LayerSlots whose `keys` and `values` are only sinks, newest tokens and the chunk at hand; the rest is packed.

    A token is quantised at the end of the pass in which it gets older than the `window` newest. The first four
    arguments: as of LayerSlots.
    """

    buffers: ClassVar[tuple[str, ...]] = ("scores", "source_index")

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        capacity: int,
        kernel: Kernel,
        policy: Policy,
        bits: int,
        scratch: Scratch,
    ) -> None:
        self.window = min(policy.recent, WINDOW)
        super().__init__(key, value, capacity - packed_slots(policy), kernel)
        self.scores = self.scores.new_zeros(*key.shape[:2], capacity)
        self.source_index = self.source_index.new_zeros(*key.shape[:2], capacity)
        self.policy = policy
        self.packed_keys, self.packed_values = QuantisedRows(key, bits), QuantisedRows(value, bits)
        # of each channel of the keys, [batch, kv_heads, 1, head_dim] float32, since the first left the window
        self.centre = self.spread = torch.empty(0)
        self.scratch = scratch

    @property
    def _full(self) -> int:
        """Slots in `keys` and `values`: the sinks, and behind them what comes after the packed ones."""
        return self.used - self.packed_keys.rows

    def append(self, key: Tensor, value: Tensor, first: int) -> None:
        start, count = self._full, key.shape[2]
        if self.used + count > self.capacity:
            self._grow(self.used + count)
        if start + count > self.keys.shape[2]:
            self._grow_full(start + count)
        self.keys[:, :, start : start + count] = key
        self.values[:, :, start : start + count] = value
        self.scores[:, :, self.used : self.used + count] = 0
        self.source_index[:, :, self.used : self.used + count] = torch.arange(first, first + count, device=key.device)
        self.used += count
        self._forget()

    def set_back(self, used: int) -> None:
        super().set_back(used)
        self._forget()

    def _grow_full(self, needed: int) -> None:
        """Only a probe that is longer than a chunk comes here."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(*old.shape[:2], needed, old.shape[3])
            new[:, :, : self._full] = old[:, :, : self._full]
            setattr(self, name, new)

    def _forget(self) -> None:
        if self.scratch.holder is self:
            self.scratch.holder = None

    def valid(self) -> tuple[Tensor, Tensor]:
        keys, values = (room.narrow(2, 0, self.used) for room in self.scratch.room(self))
        if self.scratch.holder is not self:
            rows, full = self.packed_keys.rows, self._full
            sinks = min(self.policy.sinks, full)
            for whole, stored in ((keys, self.keys), (values, self.values)):
                whole[:, :, :sinks] = stored[:, :, :sinks]
                whole[:, :, sinks + rows :] = stored[:, :, sinks:full]
            if rows:
                keys[:, :, sinks : sinks + rows] = self.packed_keys.read().mul_(self.spread).add_(self.centre)
                values[:, :, sinks : sinks + rows] = self.packed_values.read()
            self.scratch.holder = self
        return keys, values

    def leave_window(self, sinks: int, recent: int) -> None:
        leaving, full = slice(sinks, self._full - self.window), self._full
        if leaving.stop <= sinks:
            return
        if not self.centre.numel():
            self._look_at_channels(self.keys[:, :, sinks:full].float())
        self.packed_keys.add((self.keys[:, :, leaving].float() - self.centre) / self.spread)
        self.packed_values.add(self.values[:, :, leaving])
        for stored in (self.keys, self.values):
            stored[:, :, sinks : sinks + self.window] = stored[:, :, leaving.stop : full].clone()
        self._forget()

    def _look_at_channels(self, keys: Tensor) -> None:
        """Set each channel's mean and standard deviation; of few keys the latter may be far too small by chance."""
        self.centre = keys.mean(dim=2, keepdim=True)
        spread = keys.std(dim=2, correction=0, keepdim=True)
        self.spread = spread.clamp(min=_NARROWEST * spread.mean(dim=-1, keepdim=True)).clamp(min=1e-30)

    def compact(self, sinks: int, recent: int, chosen: Tensor) -> None:
        self.leave_window(sinks, recent)
        rows = self.packed_keys.rows
        older = torch.arange(rows - (recent - self.window), rows, device=chosen.device).expand(*chosen.shape[:2], -1)
        kept = torch.cat([chosen - sinks, older], dim=2)
        for packed in (self.packed_keys, self.packed_values):
            packed.keep(kept)
        super().compact(sinks, recent, chosen)
        self._forget()

    def kv_bytes(self, slots: int) -> int:
        rows = max(0, slots - self.policy.sinks - self.window)
        per_row = self.packed_keys.row_bytes + self.packed_values.row_bytes
        return super().kv_bytes(slots - rows) + rows * per_row + self.centre.nbytes + self.spread.nbytes

    def state(self) -> dict[str, Tensor]:
        kept = {name: getattr(self, name)[:, :, : self._full].contiguous() for name in ("keys", "values")}
        kept |= {"centre": self.centre, "spread": self.spread}
        for name, packed in (("keys", self.packed_keys), ("values", self.packed_values)):
            kept |= {f"{name}_codes": packed.codes, f"{name}_steps": packed.steps}
        return super().state() | kept

    def load(self, parts: dict[str, Tensor]) -> None:
        super().load(parts)
        self.packed_keys.load(parts["keys_codes"], parts["keys_steps"])
        self.packed_values.load(parts["values_codes"], parts["values_steps"])
        if self.packed_keys.rows != self.packed_values.rows:
            raise ValueError
        self.centre, self.spread = parts["centre"].clone(), parts["spread"].clone()
        known = self.centre.shape == (*self.keys.shape[:2], 1, self.keys.shape[3])
        if self.spread.shape != self.centre.shape or not (known or (self.centre.numel() == self.packed_keys.rows == 0)):
            raise ValueError
        full = self._full
        for name in ("keys", "values"):
            stored: Tensor = getattr(self, name)
            if full > stored.shape[2] or parts[name].shape != (*stored.shape[:2], full, stored.shape[3]):
                raise ValueError
            stored[:, :, :full] = parts[name]
