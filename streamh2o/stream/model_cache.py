"""What models of `transformers` ask of any cache: the answers that ours give."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class ModelCache(Cache):
    """A cache of ours, as a model sees it.

    tokens: columns of the batch that went through so far (not slots). layers_count: the model's layers.
    """

    tokens: int
    layers_count: int

    def get_seq_length(self, layer_idx: int = 0, **kwargs: Any) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # as older releases of transformers give it: the positions
            query_length = query_length.shape[0] if query_length.dim() else int(query_length)
        return query_length + self.tokens, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_cache_shape(self, *args: Any, **kwargs: Any) -> int:
        return -1

    get_max_length = get_max_cache_shape

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.layers_count

    is_linear = is_dummy = is_sliding

    @property
    def is_compileable(self) -> bool:
        return False
