"""ALiBi: positions as a bias of the logits, with a slope for each head, instead of a rotation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from streamh2o.errors import UserError

_DIGIT = 256  # positions are written in two digits, each of which bfloat16 has exactly: up to 256 * 256 of them


@dataclass(frozen=True)
class AlibiTable:
    """The slopes of a model's heads, [heads] float32: a logit grows by slope * (key's position - query's position).

    Queries and keys get `extra` components more, whose products are that bias, so that whatever multiplies queries by
    keys needs to know nothing of it. The share of the query's position is the same for all keys, which softmax does
    not see; it is there to keep the logits of near keys small, and therefore exact.
    """

    slopes: Tensor
    extra: ClassVar[int] = 4  # two digits of the position, one, and zero, since the kernel wants an even size

    @classmethod
    def from_model(cls, model: Any) -> AlibiTable:
        """Read the slopes off what the code of the model's family adds to logits. Raises UserError for other code."""
        decoder: nn.Module = model.get_decoder()
        config, code = model.config.get_text_config(), vars(sys.modules[type(decoder).__module__])
        heads = config.num_attention_heads
        if "build_mpt_alibi_tensor" in code:
            biases = code["build_mpt_alibi_tensor"](heads, 2)  # without `alibi_bias_max`, as the model itself calls it
        elif "build_alibi_tensor" in code:
            biases = code["build_alibi_tensor"](torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)
        else:
            raise UserError(f"{type(model).__name__} makes its ALiBi biases in a way that streamh2o does not know.")
        slopes = (biases[:, 0, 1] - biases[:, 0, 0]).float()  # [heads, 1, 2], of two tokens that follow each other
        if config.model_type == "falcon":  # which adds them before it scales the logits
            slopes = slopes * (config.hidden_size // heads) ** -0.5
        return cls(slopes.to(next(model.parameters()).device))

    @property
    def device(self) -> torch.device:
        return self.slopes.device

    def to(self, device: torch.device) -> AlibiTable:
        return AlibiTable(self.slopes.to(device))

    def place_queries(self, x: Tensor, at: slice | Tensor, scale: float = 1.0) -> Tensor:
        """Queries `x` [batch, heads, n, head_dim] times `scale`, as they are at the positions `at`, a slice or [n].

        Returns [batch, heads, n, head_dim + extra] in the type of `x`.
        """
        out, slopes = self._with_room(x), self.slopes[:, None]  # [heads, 1]
        torch.mul(x, scale, out=out[..., : x.shape[-1]])
        parts = _DIGIT * slopes, slopes, -slopes * self._numbers(at), torch.zeros_like(slopes)
        for component, part in enumerate(parts):
            out[..., x.shape[-1] + component] = part
        return out

    def place_keys(self, x: Tensor, at: slice | Tensor) -> Tensor:
        """Keys `x` [batch, kv_heads, n, head_dim] as they are at `at`: a slice, [n] or [batch, kv_heads, n].

        Returns [batch, kv_heads, n, head_dim + extra] in the type of `x`.
        """
        out, positions = self._with_room(x), self._numbers(at)
        out[..., : x.shape[-1]] = x
        digits = positions // _DIGIT, positions % _DIGIT
        for component, part in enumerate((*digits, torch.ones_like(positions), torch.zeros_like(positions))):
            out[..., x.shape[-1] + component] = part
        return out

    def _with_room(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] + self.extra)

    def _numbers(self, at: slice | Tensor) -> Tensor:
        return torch.arange(at.start, at.stop, device=self.device) if isinstance(at, slice) else at
