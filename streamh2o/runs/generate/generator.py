"""Tokens without end: read ids, choose the next one."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from streamh2o.models.loaded import Loaded
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.runs.saving.checks import require_count
from streamh2o.stream.lending import cache_argument
from streamh2o.stream.stream_cache import StreamCache

_COLDEST = 1e-4  # temperature below which the likeliest token takes all, and logits could overflow


class Sampler:
    """The processors of `transformers` for `sampling`, and its `random` numbers. seed: the one in use."""

    def __init__(self, sampling: Sampling, device: torch.device, suppressed: Collection[int] = ()) -> None:
        self.sampling = sampling
        self._greedy = sampling.greedy or sampling.temperature < _COLDEST or sampling.top_k == 1
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self.random = torch.Generator(device).manual_seed(self.seed)
        self._all = LogitsProcessorList()
        if sampling.repetition_penalty != 1 and sampling.repeat_last:
            self._all.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if suppressed:
            self._all.append(SuppressTokensLogitsProcessor(sorted(suppressed), device=str(device)))
        self._top_k = sampling.top_k
        self._best = LogitsProcessorList()  # on the top k alone: to sort the whole vocabulary takes milliseconds
        if not self._greedy:
            if sampling.temperature != 1:
                self._best.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_p < 1:
                self._best.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p > 0:
                self._best.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, logits: Any, newest: Any) -> int:
        """The next token. logits: [1, vocabulary], float32, written to. newest: [1, n], the tokens to penalise."""
        scores = self._all(newest, logits)
        if self._greedy:
            return int(scores.argmax())
        index = None
        if self._top_k and self._top_k < scores.shape[1]:
            scores, index = scores.topk(self._top_k, dim=1)
        scores = self._best(newest, scores)
        choice = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.random)
        return int(choice if index is None else index.gather(1, choice))


class Generator:
    """Continues what it has read, token by token, with `cache`.

    ends: tokens that end a text; they are given out by `tokens`, which stops there, and are read only if more is.
    endless: never choose them. What was read and chosen is forgotten but for what `cache` and the penalty need.
    """

    def __init__(
        self,
        loaded: Loaded,
        cache: StreamCache,
        sampling: Sampling,
        ends: Collection[int] = (),
        endless: bool = False,
    ) -> None:
        self._model, self.cache = loaded.model, cache
        self._argument = cache_argument(loaded.model)
        self._ends = frozenset(() if endless else ends)
        self.sampler = Sampler(sampling, loaded.device, ends if endless else ())
        self._newest: deque[int] = deque(maxlen=max(1, sampling.repeat_last))
        self._logits: Tensor | None = None  # [1, vocabulary], of the token after all that was read
        self.read_tokens = 0
        self.new_tokens = 0
        self.seconds = 0.0  # spent on new tokens

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, and counts that survive JSON, to go on with the same tokens; between two tokens."""
        groups = self.cache.groups  # one, or none before anything was read
        tensors = groups[0].state() if groups else {}
        tensors["newest"] = torch.tensor(list(self._newest), dtype=torch.int64)
        tensors["random"] = self.sampler.random.get_state()
        if self._logits is not None:
            tensors["logits"] = self._logits
        counts = {"slots": groups[0].counts() if groups else None, "seed": self.sampler.seed, "seconds": self.seconds}
        return tensors, counts | {"read": self.read_tokens, "new": self.new_tokens}

    def load_state(self, tensors: dict[str, Tensor], counts: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises UserError, LookupError, TypeError or ValueError where it is not that."""
        vocabulary, newest = self._model.config.get_text_config().vocab_size, tensors["newest"]
        if newest.dtype != torch.int64 or (len(newest) and not 0 <= newest.min() <= newest.max() < vocabulary):
            raise ValueError
        on_device = {name: tensor.to(self._model.device) for name, tensor in tensors.items()}
        if counts["slots"] is not None:
            group = self.cache.new_group()
            group.load(on_device, counts["slots"])
            self.cache.groups, self.cache.tokens = [group], group.tokens
            self._logits = on_device["logits"]
            if self._logits.shape != (1, vocabulary):
                raise ValueError
        self._newest.extend(newest.tolist())
        self.sampler.seed, self.seconds = counts["seed"], float(counts["seconds"])
        self.sampler.random.set_state(tensors["random"].cpu())
        for number in (counts["read"], counts["new"]):
            require_count(number)
        self.read_tokens, self.new_tokens = counts["read"], counts["new"]

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> None:
        """Read `ids` after what was read and chosen so far."""
        if not ids:
            return
        tensor = torch.tensor([list(ids)], device=self._model.device)
        arguments: dict[str, Any] = {self._argument: self.cache, "logits_to_keep": 1}
        self._logits = self._model(input_ids=tensor, **arguments).logits[:, -1].float()
        self._newest.extend(ids)
        self.read_tokens += len(ids)

    @torch.inference_mode()
    def tokens(self, count: int | None) -> Iterator[int]:
        """Up to `count` new tokens, without end where it is None. Something must have been read before."""
        while count is None or count > 0:
            start = time.perf_counter()
            assert self._logits is not None
            newest = torch.tensor([list(self._newest)], device=self._logits.device)
            token = self.sampler(self._logits.clone(), newest)
            self.new_tokens += 1
            if token in self._ends:
                self.seconds += time.perf_counter() - start
                yield token
                return
            self.read([token])
            self.read_tokens -= 1
            self.seconds += time.perf_counter() - start
            yield token
            count = None if count is None else count - 1
