"""Which parts of a text a question is about: how likely it becomes after each, and which of its words stand there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from streamh2o.ask.wording import Wording
from streamh2o.errors import UsageError
from streamh2o.models.prompts import Prompter
from streamh2o.stream.lm_head import LmHead
from streamh2o.stream.probe_tree import ProbeTree

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.stream.chunk_stream import ChunkStream

KEPT = 64  # candidates remembered per question while the text passes
_KINDS = {  # of what is saved of a question
    "places": torch.int64,
    "nll": torch.float32,
    "found": torch.bool,
    "total": torch.float64,
    "count": torch.int64,
}
BATCH_TOKENS = 1024  # of one pass over short texts


@dataclass(frozen=True)
class Part:
    """A stretch of the input: bytes `start` to `end`, the end not included."""

    start: int
    end: int


@dataclass(frozen=True)
class _Look:
    """A part, what one question's ids lost after it (float32 [ids]), and the questions' words that it holds."""

    part: Part
    nll: np.ndarray
    found: frozenset[str]


@dataclass
class _Seen:
    """Looks at the parts that may matter for one question, and the mean loss of its ids over all parts so far."""

    looks: list[_Look] = field(default_factory=list)
    total: np.ndarray | None = None
    count: int = 0

    @property
    def typical(self) -> np.ndarray:
        """Mean loss of each id, over the whole text so far: float64 [ids]."""
        assert self.total is not None
        return self.total / self.count

    def add(self, look: _Look) -> None:
        self.total = look.nll.astype(np.float64) if self.total is None else self.total + look.nll
        self.count += 1
        self.looks.append(look)

    def state(self, words: Sequence[str]) -> dict[str, torch.Tensor]:
        """What `load_state` takes. words: all that a look can have found, in their order."""
        assert self.total is not None
        return {
            "places": torch.tensor([[look.part.start, look.part.end] for look in self.looks]),
            "nll": torch.from_numpy(np.stack([look.nll for look in self.looks])),
            "found": torch.tensor([[word in look.found for word in words] for look in self.looks], dtype=torch.bool),
            "total": torch.from_numpy(self.total),
            "count": torch.tensor(self.count),
        }

    def load_state(self, state: dict[str, torch.Tensor], words: Sequence[str]) -> None:
        rows = zip(state["places"].tolist(), state["nll"].numpy(), state["found"].tolist(), strict=True)
        self.looks = [
            _Look(Part(*place), nll, frozenset(word for word, there in zip(words, held, strict=True) if there))
            for place, nll, held in rows
        ]
        self.total, self.count = state["total"].numpy(), int(state["count"])


def gain(typical: np.ndarray, nll: np.ndarray) -> float:
    """How many nats likelier than usual a question is: typical and actual losses of its ids, [ids] each."""
    return float((typical - nll).sum())


class Retriever:
    """Ranks the parts of a text for several questions while it streams.

    After some chunks, `look` runs all questions side by side against the stream's cache, and leaves nothing in it. Only
    places in the text are kept, so that the text can be read again there. longest: positions that a look needs after
    the text.
    Raises UsageError where a question has more tokens than a chunk.
    """

    def __init__(self, loaded: Loaded, prompter: Prompter, questions: Sequence[str], chunk: int) -> None:
        self.prompter, self.questions = prompter, list(questions)
        self.wording = Wording(questions)
        stem = self.prompter.stem
        self.ids = [self.prompter.question(question) for question in questions]
        for question, ids in zip(questions, self.ids, strict=True):
            if len(ids) + len(stem) > chunk:
                raise UsageError(
                    f"The question {question[:40]!r}... has {len(ids)} tokens, more than --chunk {chunk} can take; "
                    "shorten it or raise --chunk."
                )
        self._groups = _groups([len(ids) for ids in self.ids], chunk - len(stem))
        # Nothing is asked after the last id of a question, so it need not be read.
        self._trees = [ProbeTree(stem, [self.ids[q][:-1] for q in group], loaded.device) for group in self._groups]
        self.longest = max(tree.branches.longest for tree in self._trees)
        self._seen = [_Seen() for _ in questions]

    def look(self, stream: ChunkStream, part: Part, data: bytes) -> None:
        """Score `part`, which `stream` has just read and whose bytes are `data`."""
        found = self.wording.look(data)
        for group, tree in zip(self._groups, self._trees, strict=True):
            hidden = stream.probe(torch.tensor([tree.ids]), tree.branches)[0]
            before = [place for path in range(len(group)) for place in tree.before(path)]
            with torch.inference_mode():
                wanted = torch.tensor([token for q in group for token in self.ids[q]], device=hidden.device)
                nll = stream.logits.losses(hidden[before], wanted).cpu().numpy()
            for q, each in zip(group, _split(nll, [len(self.ids[q]) for q in group]), strict=True):
                seen = self._seen[q]
                seen.add(_Look(part, each, found))
                if len(seen.looks) >= 2 * KEPT:
                    seen.looks = [look for look, _ in self._ranked(q)[:KEPT]]

    def state(self) -> dict[str, torch.Tensor]:
        """What is remembered of the text so far, to go on from; empty before the first `look`."""
        if not self._seen[0].count:
            return {}
        tensors = {f"words.{name}": part for name, part in self.wording.state().items()}
        for number, seen in enumerate(self._seen):
            tensors |= {f"question{number}.{name}": part for name, part in seen.state(self.wording.words).items()}
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor], end: int) -> None:
        """Put back what `state` gave after `end` bytes. Raises KeyError, TypeError or ValueError for anything else."""
        words = self.wording.words
        self.wording.load_state({name: tensors[f"words.{name}"] for name in ("in_parts", "in_sentences", "sizes")})
        for number, (seen, ids) in enumerate(zip(self._seen, self.ids, strict=True)):
            parts = {name: tensors[f"question{number}.{name}"] for name in _KINDS}
            if any(parts[name].dtype != kind for name, kind in _KINDS.items()):
                raise TypeError
            n = len(parts["places"])
            if not n or parts["nll"].shape != (n, len(ids)) or parts["total"].shape != (len(ids),):
                raise ValueError
            if parts["found"].shape != (n, len(words)):
                raise ValueError
            if parts["count"] < n or parts["places"].min() < 0 or parts["places"].max() > end:
                raise ValueError
            seen.load_state(parts, words)

    def best(self, question: int, count: int) -> list[tuple[Part, float]]:
        """The parts that a question is likeliest about, best first, with their scores, 0 to 2."""
        return [(look.part, score) for look, score in self._ranked(question)[:count]]

    def _ranked(self, question: int) -> list[tuple[_Look, float]]:
        """A part's score: its gain in likelihood and the rarity of the question's words in it, each as a share of the
        best part's.

        Neither is enough. The form of a question can weigh more than a name in it ("Tell me the <REGISTER_CONTENT> in
        line ..."), and other words may be meant than those of the text.
        """
        seen = self._seen[question]
        gains = [max(0.0, gain(seen.typical, look.nll)) for look in seen.looks]
        rarities = [self.wording.of_part(question, look.found) for look in seen.looks]
        most = [max(values) or 1.0 for values in (gains, rarities)]
        scores = [each / most[0] + rarity / most[1] for each, rarity in zip(gains, rarities, strict=True)]
        return sorted(zip(seen.looks, scores, strict=True), key=lambda pair: -pair[1])

    def worth_reading(self, question: int, count: int, share: float) -> list[Part]:
        """The best part, and of the next ones, `count` in all, those with at least `share` of its score."""
        (first, most), *others = self.best(question, count)
        return [first, *(part for part, score in others if score >= share * most)]


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
    """The losses of each continuation after its context, each pair read alone: float32 [continuation], nats."""
    head = LmHead(loaded.model, loaded.kernel)
    results: list[np.ndarray] = [np.empty(0, np.float32)] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda n: sum(map(len, pairs[n])))
    while order:
        batch = [order.pop(0)]
        width = sum(map(len, pairs[batch[0]]))
        while order and (wider := sum(map(len, pairs[order[0]]))) * (len(batch) + 1) <= BATCH_TOKENS:
            width = wider
            batch.append(order.pop(0))
        # Padding stands after the last token that counts, where causal attention never looks.
        # Nothing is asked after the last id, so it need not be read.
        rows = [pairs[n][0] + pairs[n][1][:-1] for n in batch]
        ids = torch.tensor([row + [0] * (width - 1 - len(row)) for row in rows], device=loaded.device)
        hidden = loaded.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        before = [hidden[row, len(pairs[n][0]) - 1 : len(rows[row])] for row, n in enumerate(batch)]
        targets = torch.tensor([token for n in batch for token in pairs[n][1]], device=loaded.device)
        nll = head.losses(torch.cat(before), targets).cpu().numpy()
        for n, each in zip(batch, _split(nll, [len(pairs[n][1]) for n in batch]), strict=True):
            results[n] = each
    return results
