"""What evaluation harnesses ask of a model: read a prompt under a budget, then score or write what follows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from streamh2o.cache.families import trained_positions
from streamh2o.errors import UsageError, UserError
from streamh2o.models.loaded import Loaded
from streamh2o.policies import Policy, find_policy, make_policy
from streamh2o.runs.generate.characters import Characters
from streamh2o.runs.generate.generator import Sampler
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.stream.chunk_stream import ChunkResult, ChunkStream

LEAST_BESIDE_SINKS = 2  # slots: one recent token and one hitter
TYPICAL = 2048  # tokens of a prompt that settings are tried with


@dataclass(frozen=True)
class Budget:
    """Slots per layer and KV head: a number of them, or a share of the prompt's tokens (arXiv 2306.14048, section 5).

    One of `slots` and `share` is None.
    """

    slots: int | None
    share: Fraction | None

    @classmethod
    def parse(cls, cache: int | float | str) -> Budget:
        """`512`, or `20%`. Raises UsageError for anything else."""
        text = str(cache).strip()
        try:
            if text.endswith("%"):
                share = Fraction(text[:-1].strip()) / 100
                if not 0 < share <= 1:
                    raise ValueError
                return cls(None, share)
            slots = int(text)
            if slots < 1:
                raise ValueError
            return cls(slots, None)
        except (ValueError, ZeroDivisionError):
            raise UsageError(
                f"cache is {text}; it must be a number of slots, such as 512, or a share of the prompt above 0% and up "
                "to 100%, such as 20%."
            ) from None

    def of(self, tokens: int, sinks: int) -> int:
        """Slots for a prompt of `tokens`; a share is rounded down and never less than `sinks` + 2."""
        if self.slots is not None:
            return self.slots
        assert self.share is not None
        return max(int(tokens * self.share), sinks + LEAST_BESIDE_SINKS)


class Scorer:
    """Reads prompts with `loaded` under a policy whose budget follows each prompt, and scores or writes what follows.

    policy, sinks, knobs: as for `make_policy`. cache: see `Budget.parse`. evict: `token` evicts after every token of
    prompt and continuation, as the H2O paper does; `chunk` after every `chunk` tokens (and at the end of the prompt),
    so that a prompt no longer than a chunk is seen whole, also by the first token after it. chunk: most tokens of one
    pass.

    Nothing is kept from one call to the next. Raises UsageError for settings that do not fit each other or the model.
    """

    def __init__(
        self,
        loaded: Loaded,
        policy: str = "streamh2o",
        cache: int | float | str = "20%",
        *,
        evict: str = "token",
        chunk: int = 256,
        sinks: int | None = None,
        **knobs: Any,
    ) -> None:
        self.loaded, self.budget, self.evict = loaded, Budget.parse(cache), evict
        self._name, self._knobs = policy, knobs
        if self.budget.share is not None and (set(knobs) & {"recent", "hitters"}):
            raise UsageError("recent and hitters are numbers of slots; with a share as cache the policy splits it.")
        kind = find_policy(policy)
        if evict == "token" and (kind.across_layers or kind.recomputes):
            raise UsageError(
                f"The policy {policy} cannot evict after every token; give evict=chunk, with chunk=1 or more."
            )
        self._sinks = kind.default_sinks if sinks is None else sinks
        trained = trained_positions(loaded.model.config)
        self.chunk = chunk if kind.evicts else min(chunk, trained)
        self._most = trained - chunk  # slots
        with self._stream(min(trained, TYPICAL)):  # settings that cannot work fail before the first request
            pass

    def policy_for(self, tokens: int) -> Policy:
        """The policy for a prompt of so many tokens."""
        slots = self.budget.of(tokens, self._sinks)
        if self.budget.share is not None:
            slots = min(slots, max(self._most, self._sinks + LEAST_BESIDE_SINKS))
        return make_policy(self._name, slots, sinks=self._sinks, **self._knobs)

    def fit(self, context: Sequence[int], after: int) -> list[int]:
        """The end of `context` that leaves room for `after` more tokens, where the policy evicts nothing; else all."""
        if find_policy(self._name).evicts:
            return list(context)
        room = max(trained_positions(self.loaded.model.config) - after, 1)
        return list(context[-room:])

    def loglikelihoods(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-likelihood after `context`, in nats, and whether it is the greedy one.

        context: one token or more, which is read once; its own losses do not count. Each continuation goes on from
        there as if it were the only one.
        """
        with self._stream(len(context)) as stream:
            for _, chunk in _in_chunks(stream, context, score=False):
                hidden = chunk.hidden[:, -1:].clone()
            saved = stream.state() if len(continuations) > 1 else None
            results = []
            for continuation in continuations:
                if saved is not None:
                    stream.load_state(*saved)
                results.append(_score(stream, hidden, continuation))
        return results

    def rolling(self, ids: Sequence[int], prefix: int) -> float:
        """The log-likelihood of all of `ids` in nats, the first after the token `prefix`: one stream, no windows.

        A share is one of the text's tokens. Raises UserError where the text outgrows a policy that evicts nothing.
        """
        with self._stream(len(ids)) as stream:
            return -sum(_nll(chunk) for _, chunk in _in_chunks(stream, [prefix, *ids], score=True))

    def generate(self, context: Sequence[int], until: Sequence[str], most: int, sampling: Sampling) -> str:
        """What follows `context`, up to `most` tokens, an end of text or a string of `until`, without it."""
        ends, text = self._ends(), ""
        characters = Characters(self.loaded.tokenizer, context)
        sampler = Sampler(sampling, self.loaded.device)
        seen = list(context)
        with self._stream(len(context)) as stream, torch.inference_mode():
            fresh: Sequence[int] = context
            for _ in range(most):
                for _, chunk in _in_chunks(stream, fresh, score=False):
                    logits = stream.logits(chunk.hidden[:, -1]).float()
                newest = torch.tensor([seen[-sampling.repeat_last :]], device=logits.device)
                token = sampler(logits, newest)
                if token in ends:
                    break
                text += characters.feed(token)
                if _first_stop(text, until) is not None:
                    break
                fresh = [token]
                seen.append(token)
        text += characters.flush()
        end = _first_stop(text, until)
        return text if end is None else text[:end]

    def _ends(self) -> frozenset[int]:
        generation = getattr(self.loaded.model, "generation_config", None)
        given = getattr(generation, "eos_token_id", None)
        ends = given if isinstance(given, list) else [given]
        return frozenset(end for end in [*ends, self.loaded.tokenizer.eos_token_id] if end is not None)

    def _stream(self, tokens: int) -> ChunkStream:
        policy, kernel = self.policy_for(tokens), self.loaded.kernel
        return ChunkStream(self.loaded.model, policy, chunk=self.chunk, evict=self.evict, kernel=kernel)


def _in_chunks(stream: ChunkStream, ids: Sequence[int], score: bool) -> Iterator[tuple[Tensor, ChunkResult]]:
    """Read `ids`; yields those of each chunk, [1, n], with its losses and hidden states."""
    for piece in torch.tensor([list(ids)]).split(stream.chunk, dim=1):
        yield piece, stream.feed(piece, score)


def _nll(chunk: ChunkResult) -> float:
    """The sum of a chunk's losses, in nats. Raises UserError where one is no number: `feed` skips that on a GPU."""
    total = float(chunk.losses.double().sum())
    if not math.isfinite(total):
        raise UserError("A loss is not a finite number; try --dtype float32.")
    return total


@torch.inference_mode()
def _score(stream: ChunkStream, hidden: Tensor, ids: Sequence[int]) -> tuple[float, bool]:
    """The log-likelihood of `ids` in nats, and whether each is the likeliest token.

    hidden: [1, 1, hidden_size], the state after the newest token that `stream` has read.
    """
    total, greedy = 0.0, True
    if not ids:
        return total, greedy
    for piece, chunk in _in_chunks(stream, ids, score=True):
        total -= _nll(chunk)
        if greedy:
            before = torch.cat([hidden, chunk.hidden[:, :-1]], dim=1)
            greedy = torch.equal(stream.logits(before).argmax(dim=-1).cpu(), piece)
        hidden = chunk.hidden[:, -1:].clone()
    return total, greedy


def _first_stop(text: str, until: Sequence[str]) -> int | None:
    """Where the first of the strings begins in `text`."""
    return min((place for stop in until if stop and (place := text.find(stop)) >= 0), default=None)
