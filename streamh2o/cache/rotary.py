"""Positions in the cache and rotation. RoPE angles come from the model, positions from the cache, not the document."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from streamh2o.cache.alibi import AlibiTable
from streamh2o.cache.families import ALIBI, rotation_kinds
from streamh2o.errors import UserError

Style = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How each layer of a model rotates: `tables[layer]`, or None if the layer has no positions (NoPE).

    Slopes (ALiBi) count as a way to rotate. positions: the number of positions in the cache, which is the length the
    model was trained for.
    """

    tables: Sequence[Table | None]
    positions: int
    _moved: dict[tuple[int, torch.device], Table] = field(default_factory=dict, repr=False, compare=False)

    @property
    def extra(self) -> int:
        """By how many components a rotated key is longer than a key."""
        return max((table.extra for table in self.tables if table is not None), default=0)

    def table(self, layer: int, device: torch.device) -> Table | None:
        """How `layer` rotates, on `device`, where its keys lie; layers on one device share what they have in common."""
        table = self.tables[layer]
        if table is None or table.device == device:
            return table
        key = id(table), device
        if key not in self._moved:
            self._moved[key] = table.to(device)
        return self._moved[key]

    @classmethod
    def from_model(cls, model: nn.Module, positions: int) -> Rotary:
        """Read the tables off `model`. Raises UserError where it has no rotary module we understand."""
        config: Any = model.config
        kinds = rotation_kinds(config)
        made: dict[str | None, Table | None] = {None: None}
        for kind in kinds:
            if kind == ALIBI and kind not in made:
                made[kind] = AlibiTable.from_model(model)
            elif kind not in made:
                made[kind] = RotaryTable.from_model(model, positions, kind or None)
        return cls([made[kind] for kind in kinds], positions)


@contextmanager
def _first_angles(module: Any, kind: str | None) -> Iterator[None]:
    """Give dynamic NTK its first angles inside the block, also after a text longer than the first length."""
    prefix = "" if kind is None else f"{kind}_"
    types: Any = getattr(module, "rope_type", None)
    if "dynamic" not in str(types if kind is None else types[kind]):
        yield
        return
    now = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(now.device).clone())
    try:
        yield
    finally:
        setattr(module, f"{prefix}inv_freq", now)


@dataclass
class RotaryTable:
    """Cosines and sines of every in-cache position, float32, taken from the model's own rotary module.

    `cos` and `sin` are [positions, rotary_dim / 2]. The module's `attention_scaling` (YaRN, longrope) is divided
    out, because the model has already applied it when it "rotated" by position zero. `style` says which
    components form a pair: `half` (Llama: i and i + d/2) or `interleaved` (GPT-J, Cohere: 2i and 2i + 1). Only the
    first `rotary_dim` components of a head are rotated (partial rotary of GPT-NeoX and Phi).
    """

    cos: Tensor
    sin: Tensor
    style: Style = "half"
    extra: ClassVar[int] = 0

    @property
    def device(self) -> torch.device:
        return self.cos.device

    def to(self, device: torch.device) -> RotaryTable:
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device))

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    @classmethod
    def from_model(cls, model: nn.Module, positions: int, kind: str | None = None) -> RotaryTable:
        """The table of the layers of one `kind` (`config.layer_types`; None: all layers share one)."""
        device = next(model.parameters()).device
        module: Any = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
        if module is None:
            raise UserError(f"{type(model).__name__} has no rotary position embedding that streamh2o knows.")
        if kind is not None and not hasattr(module, f"{kind}_inv_freq"):
            kind = None  # older transformers: OLMo 3 has one table for all
        with torch.no_grad(), _first_angles(module, kind):
            ids = torch.arange(positions, device=device)[None]
            extra = () if kind is None else (kind,)
            first, second = module(torch.zeros(1, device=device), ids, *extra)  # each [1, positions, ...]
        if hasattr(module, "embed_positions"):  # GPT-J: sines first, one for each pair
            table = cls(second[0].float().contiguous(), first[0].float().contiguous(), "interleaved")
            table._check_against(module, first, second)
            return table
        name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
        scaling = float(getattr(module, name, 1.0))
        cos, sin = first[0].float() / scaling, second[0].float() / scaling
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            table = cls(cos[:, :half].contiguous(), sin[:, :half].contiguous(), "half")
        elif torch.equal(cos[:, 0::2], cos[:, 1::2]):
            table = cls(cos[:, 0::2].contiguous(), sin[:, 0::2].contiguous(), "interleaved")
        else:
            raise UserError(f"The rotary layout of {type(model).__name__} is not one that streamh2o knows.")
        table._check_against(module, first / scaling, second / scaling)
        return table

    def _check_against(self, module: nn.Module, first: Tensor, second: Tensor) -> None:
        """Compare with the helper in the model's own file. A family that pairs components differently is refused."""
        helper: Any = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if helper is None:
            return
        n = min(16, self.cos.shape[0])
        x = torch.randn(1, 1, n, self.rotary_dim, generator=torch.Generator().manual_seed(0)).to(self.cos.device)
        if hasattr(module, "embed_positions"):
            expected = helper(x.transpose(1, 2), first[:, :n], second[:, :n]).transpose(1, 2)
        else:
            expected, _ = helper(x, x, first[:, :n], second[:, :n])
        if not torch.allclose(self.rotate(x, self.cos[:n], self.sin[:n]), expected, atol=1e-4):
            raise UserError(f"The rotation of {type(module).__name__} is not one that streamh2o knows.")

    def place_queries(self, x: Tensor, at: slice | Tensor, scale: float = 1.0) -> Tensor:
        """Queries `x` [batch, heads, n, head_dim] times `scale`, rotated to the positions `at`, a slice or [n]."""
        return self.rotate(x, self.cos[at], self.sin[at], scale)

    def place_keys(self, x: Tensor, at: slice | Tensor) -> Tensor:
        """Keys `x` [batch, kv_heads, n, head_dim] rotated to `at`: a slice, [n] or [batch, kv_heads, n]."""
        return self.rotate(x, self.cos[at], self.sin[at])

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0) -> Tensor:
        """A rotated copy of `x` [..., n, head_dim] by `cos`, `sin` [..., n, rotary_dim / 2], times `scale`.

        The products are in float32, since angles of far positions lose their meaning in bfloat16; the result has
        the type of `x`.
        """
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d = self.rotary_dim
        if self.style == "half":
            x1, x2, out1, out2 = (
                x[..., : d // 2],
                x[..., d // 2 : d],
                out[..., : d // 2],
                out[..., d // 2 : d],
            )
        else:
            x1, x2, out1, out2 = x[..., 0:d:2], x[..., 1:d:2], out[..., 0:d:2], out[..., 1:d:2]
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        if x.dtype == cos.dtype:
            torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-1)
            torch.mul(x2, cos, out=out2).addcmul_(x1, sin)
        else:
            out1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
            out2.copy_((x2 * cos).addcmul_(x1, sin))
        if d < x.shape[-1]:
            torch.mul(x[..., d:], scale, out=out[..., d:])
        return out


Table = RotaryTable | AlibiTable
