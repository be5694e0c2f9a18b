"""In-cache positions and rotation: RoPE angles come from the model, positions from the cache, never the document."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from streamh2o.errors import UserError

Style = Literal["half", "interleaved"]


@dataclass
class Rotary:
    """Cosines and sines of every in-cache position, float32, taken from the model's own rotary module.

    `cos` and `sin` are [positions, rotary_dim / 2]. The module's `attention_scaling` (YaRN, longrope) is divided
    out, because the model has already applied it when it "rotated" by position zero. `style` says which
    components form a pair: `half` (Llama: i and i + d/2) or `interleaved` (GPT-J, Cohere: 2i and 2i + 1). Only the
    first `rotary_dim` components of a head are rotated (partial rotary of GPT-NeoX and Phi).
    """

    cos: Tensor
    sin: Tensor
    style: Style = "half"

    @property
    def positions(self) -> int:
        """How many positions the tables hold: the length the model was trained for."""
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    @classmethod
    def from_model(cls, model: nn.Module, positions: int) -> Rotary:
        """Read the tables off `model`. Raises UserError where the model has no rotary module we understand."""
        module = next((m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "forward")), None)
        if module is None:
            raise UserError(f"{type(model).__name__} has no rotary position embedding, which streaming needs.")
        device = next(model.parameters()).device
        ids = torch.arange(positions, device=device)[None]
        with torch.no_grad():
            cos, sin = module(torch.zeros(1, device=device), ids)  # each [1, positions, rotary_dim]
        scaling = float(getattr(module, "attention_scaling", 1.0))
        cos, sin = cos[0].float() / scaling, sin[0].float() / scaling
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            table = cls(cos[:, :half].contiguous(), sin[:, :half].contiguous(), "half")
        elif torch.equal(cos[:, 0::2], cos[:, 1::2]):
            table = cls(cos[:, 0::2].contiguous(), sin[:, 0::2].contiguous(), "interleaved")
        else:
            raise UserError(f"The rotary layout of {type(model).__name__} is not one that streamh2o knows.")
        table._check_against(module, cos, sin)
        return table

    def _check_against(self, module: nn.Module, cos: Tensor, sin: Tensor) -> None:
        """Compare with the helper of the model's own file, so that a family that pairs otherwise is refused."""
        helper: Any = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if helper is None:
            return
        n = min(16, self.positions)
        x = torch.randn(1, 1, n, self.rotary_dim, generator=torch.Generator().manual_seed(0)).to(cos.device)
        expected, _ = helper(x, x, cos[None, :n], sin[None, :n])
        if not torch.allclose(self.rotate(x, self.cos[:n], self.sin[:n]), expected, atol=1e-4):
            raise UserError(f"The rotation of {type(module).__name__} is not one that streamh2o knows.")

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
