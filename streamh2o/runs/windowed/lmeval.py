"""`loglikelihood_rolling` of EleutherAI's lm-evaluation-harness, and the perplexities it makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from streamh2o.errors import UserError
from streamh2o.runs.windowed.base import Definition, Ids, Window


class LmEval(Definition):
    """Every token is scored once, in windows of `context` tokens that share one token of context.

    The first token is predicted from the BOS, or the end-of-text token where the tokenizer has no BOS, whatever the
    tokenizer puts first by itself. The last, shorter window reaches back as far as the model can read.
    Source: lm_eval, `utils.get_rolling_token_windows`, `utils.make_disjoint_window` and
    `models.huggingface.HFLM.loglikelihood_rolling`.
    """

    name: ClassVar[str] = "lmeval"
    per_word_and_byte: ClassVar[bool] = True

    def __init__(self, context: int, prefix: int) -> None:
        super().__init__(context)
        self.prefix = prefix

    @classmethod
    def make(cls, context: int, stride: int | None, tokenizer: Any) -> Definition:
        cls.refuse(stride)
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if prefix is None:
            raise UserError("lm-eval predicts the first token from a BOS or end-of-text token; there is none here.")
        return cls(context, int(prefix))

    def windows(self, ids: Ids) -> Iterator[Window]:
        done = ids.upto(self.context)
        if done:
            yield Window(np.concatenate([[self.prefix], ids[0:done]]), done, done)
        while (end := ids.upto(done + self.context)) > done:
            ids.drop(end - self.context - 1)
            yield Window(ids[end - self.context - 1 : end], end - done, end - done)
            done = end
