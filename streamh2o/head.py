"""Hidden states to losses, in blocks, so that memory does not grow with chunk x vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o import kernel

BLOCK = 128  # rows of logits at a time


def logits_function(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What turns hidden states [..., hidden] into logits [..., vocabulary], as the model's own forward does.

    Beside the output embedding a family may divide (Granite), multiply (Cohere) or soft-cap (Gemma 2) them.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        result: Tensor = head(hidden)
        if factor != 1.0:
            result = result * factor
        if cap:
            result = torch.tanh(result / cap) * cap
        return result

    return logits


def losses(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Cross entropy in nats, float32.

    hidden: [rows, hidden_size]; targets: [rows] token ids. The log-sum-exp is taken in float32 over `BLOCK` rows of
    logits at a time. Returns [rows].
    """
    result = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(targets), BLOCK):
        rows = slice(start, start + BLOCK)
        block, wanted = logits(hidden[rows]), targets[rows]
        if kernel.takes(block):
            result[rows] = kernel.losses(block, wanted)
            continue
        block = block.float()
        target = block.gather(1, wanted[:, None].to(block.device))[:, 0]  # where `--device-map` put the head
        peak = block.amax(dim=-1, keepdim=True)
        # In place: a second array of this size would cost more in page faults than the exponentials do.
        result[rows] = block.sub_(peak).exp_().sum(dim=-1).log_().add_(peak[:, 0]).sub_(target)
    return result
