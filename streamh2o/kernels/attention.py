"""Attention with column sums, by the fastest form that there is for the tensors at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from streamh2o.kernels import compiled
from streamh2o.kernels.plain import attend, attend_blocked, column_sums
from streamh2o.kernels.select import TORCH, Kernel


def attend_and_sum(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    far: int = 0,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    kernel: Kernel = TORCH,
) -> tuple[Tensor, Tensor | None]:
    """Output [batch, heads, C, head_dim], and the column sums where `weights` [C] are given.

    Arguments as of `plain.attend` and `plain.column_sums`. kernel: what to compute with, where it takes these queries.
    """
    simple = hidden is None and not softcap
    if simple and kernel.takes_queries(query):
        return compiled.attend_and_sum(query, keys, values, weights, far)
    if simple and query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[2] >= 16:
        return attend_blocked(query, keys, values, weights, far)
    output, probabilities = attend(query, keys, values, None, hidden, softcap)
    return output, None if weights is None else column_sums(probabilities, weights, far)
