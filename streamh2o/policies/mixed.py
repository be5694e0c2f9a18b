"""A part of the middle slots for heavy hitters, the others by another rule: the "+h2" of a policy's name."""

import torch
from torch import Tensor


def hitters_first(scores: Tensor, count: int, order: Tensor) -> Tensor:
    """`order` with the `count` highest scores lifted above everything else.

    scores and order: [batch, kv_heads, middle]; a slot that both would choose takes one slot, not two. Source: the
    rows "w. H2" of arXiv 2306.14048, Tables 2 and 8.
    """
    top = torch.finfo(order.dtype).max if order.is_floating_point() else torch.iinfo(order.dtype).max
    return order.scatter(-1, scores.topk(count, dim=-1).indices, top)
