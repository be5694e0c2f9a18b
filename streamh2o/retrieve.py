"""Which parts of a text a question is about: how likely the question becomes after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from streamh2o.errors import UsageError
from streamh2o.head import logits_function, losses
from streamh2o.positions import Branches
from streamh2o.prompts import Prompter

if TYPE_CHECKING:
    from streamh2o.models import Loaded
    from streamh2o.stream import Stream

KEPT = 64  # candidates remembered per question while the text passes
_KINDS = {"places": torch.int64, "nll": torch.float32, "total": torch.float64, "count": torch.int64}  # as saved
BATCH_TOKENS = 1024  # of one pass over short texts


@dataclass(frozen=True)
class Part:
    """A stretch of the input: bytes `start` to `end`, the end not included."""

    start: int
    end: int


@dataclass
class _Seen:
    """What one question's ids lost after each part: float32 [ids] each, and their mean over all parts so far."""

    parts: list[tuple[Part, np.ndarray]] = field(default_factory=list)
    total: np.ndarray | None = None
    count: int = 0

    @property
    def typical(self) -> np.ndarray:
        """Mean loss of each id, over the whole text so far: float64 [ids]."""
        assert self.total is not None
        return self.total / self.count

    def add(self, part: Part, nll: np.ndarray) -> None:
        self.total = nll.astype(np.float64) if self.total is None else self.total + nll
        self.count += 1
        self.parts.append((part, nll))
        if len(self.parts) >= 2 * KEPT:
            self.parts = self.ranked(KEPT)

    def state(self) -> dict[str, torch.Tensor]:
        """What `load_state` takes."""
        assert self.total is not None
        return {
            "places": torch.tensor([[part.start, part.end] for part, _ in self.parts]),
            "nll": torch.from_numpy(np.stack([nll for _, nll in self.parts])),
            "total": torch.from_numpy(self.total),
            "count": torch.tensor(self.count),
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        places, nll = state["places"].tolist(), state["nll"].numpy()
        self.parts = [(Part(*place), each) for place, each in zip(places, nll, strict=True)]
        self.total, self.count = state["total"].numpy(), int(state["count"])

    def ranked(self, count: int) -> list[tuple[Part, np.ndarray]]:
        return sorted(self.parts, key=lambda each: gain(self.typical, each[1]), reverse=True)[:count]


def gain(typical: np.ndarray, nll: np.ndarray) -> float:
    """How many nats likelier than usual a question is: typical and actual losses of its ids, [ids] each."""
    return float((typical - nll).sum())


class Retriever:
    """Ranks the parts of a text for several questions while it streams.

    After each chunk, `look` runs all questions side by side against the stream's cache, of which nothing stays there.
    What is remembered of the text are places, not slots: it can be read again where a question points.
    Raises UsageError where a question has more tokens than a chunk.
    """

    def __init__(self, loaded: Loaded, prompter: Prompter, questions: Sequence[str], chunk: int) -> None:
        self.prompter, self.questions = prompter, list(questions)
        self.stem = self.prompter.stem
        self.ids = [self.prompter.question(question) for question in questions]
        for question, ids in zip(questions, self.ids, strict=True):
            if len(ids) + len(self.stem) > chunk:
                raise UsageError(
                    f"The question {question[:40]!r}... has {len(ids)} tokens, more than --chunk {chunk} can take; "
                    "shorten it or raise --chunk."
                )
        self._groups = _groups([len(ids) for ids in self.ids], chunk - len(self.stem))
        self._branches = [
            Branches(len(self.stem), [len(self.ids[q]) for q in group], loaded.device) for group in self._groups
        ]
        self._seen = [_Seen() for _ in questions]

    def look(self, stream: Stream, part: Part) -> None:
        """Score `part`, which `stream` has just read."""
        for group, branches in zip(self._groups, self._branches, strict=True):
            tokens = self.stem + [token for q in group for token in self.ids[q]]
            hidden = stream.probe(torch.tensor([tokens]), branches)[0]
            targets, before, place = [], [], len(self.stem)
            for q in group:
                size = len(self.ids[q])
                before += [len(self.stem) - 1, *range(place, place + size - 1)]
                targets += self.ids[q]
                place += size
            with torch.inference_mode():
                wanted = torch.tensor(targets, device=hidden.device)
                nll = losses(hidden[before], wanted, stream.logits).cpu().numpy()
            for q, each in zip(group, _split(nll, [len(self.ids[q]) for q in group]), strict=True):
                self._seen[q].add(part, each)

    def state(self) -> dict[str, torch.Tensor]:
        """The places remembered of every question, to go on from; empty before the first `look`."""
        seen = [(number, each) for number, each in enumerate(self._seen) if each.count]
        return {f"question{number}.{name}": part for number, each in seen for name, part in each.state().items()}

    def load_state(self, tensors: dict[str, torch.Tensor], end: int) -> None:
        """Put back what `state` gave after `end` bytes. Raises KeyError, TypeError or ValueError for anything else."""
        for number, (seen, ids) in enumerate(zip(self._seen, self.ids, strict=True)):
            parts = {name: tensors[f"question{number}.{name}"] for name in _KINDS}
            if any(parts[name].dtype != kind for name, kind in _KINDS.items()):
                raise TypeError
            n = len(parts["places"])
            if not n or parts["nll"].shape != (n, len(ids)) or parts["total"].shape != (len(ids),):
                raise ValueError
            if parts["count"] < n or parts["places"].min() < 0 or parts["places"].max() > end:
                raise ValueError
            seen.load_state(parts)

    def best(self, question: int, count: int) -> list[tuple[Part, float]]:
        """The parts after which the question is likeliest, best first, with their gains in nats."""
        seen = self._seen[question]
        return [(part, gain(seen.typical, nll)) for part, nll in seen.ranked(count)]

    def worth_reading(self, question: int, count: int, share: float) -> list[Part]:
        """The best part, and of the next ones, `count` in all, those with at least `share` of its gain."""
        (first, most), *others = self.best(question, count)
        return [first, *(part for part, gained in others if gained >= share * most)]


def _groups(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Questions, in order, in groups of up to `room` tokens."""
    groups: list[list[int]] = []
    used = room
    for number, length in enumerate(lengths):
        if used + length > room:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += length
    return groups


def _split(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


@torch.inference_mode()
def likelihoods(loaded: Loaded, pairs: Sequence[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """The losses of each continuation after its context, each pair read alone: float32 [continuation], nats.

    The model must not be attached to a stream.
    """
    logits = logits_function(loaded.model)
    results: list[np.ndarray] = [np.empty(0, np.float32)] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda n: sum(map(len, pairs[n])))
    while order:
        batch = [order.pop(0)]
        width = sum(map(len, pairs[batch[0]]))
        while order and (wider := sum(map(len, pairs[order[0]]))) * (len(batch) + 1) <= BATCH_TOKENS:
            width = wider
            batch.append(order.pop(0))
        # Padding stands after the last token that counts, where causal attention never looks.
        rows = [pairs[n][0] + pairs[n][1] for n in batch]
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=loaded.device)
        hidden = loaded.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        before = [hidden[row, len(pairs[n][0]) - 1 : len(rows[row]) - 1] for row, n in enumerate(batch)]
        targets = torch.tensor([token for n in batch for token in pairs[n][1]], device=loaded.device)
        nll = losses(torch.cat(before), targets, logits).cpu().numpy()
        for n, each in zip(batch, _split(nll, [len(pairs[n][1]) for n in batch]), strict=True):
            results[n] = each
    return results
