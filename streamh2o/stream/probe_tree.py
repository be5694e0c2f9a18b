"""Several continuations of one text in one pass, in which what they begin with alike is read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from streamh2o.cache.positions import Branches


class ProbeTree:
    """`paths` after `stem`, none of which sees another, for `ChunkStream.probe`: the `ids` [n] to read, and `branches`.

    places: for each path, where in the pass each of its ids stands. `before` gives the places that predict them.
    """

    def __init__(self, stem: Sequence[int], paths: Sequence[Sequence[int]], device: torch.device) -> None:
        self.stem = len(stem)
        self.ids = list(stem)
        self.places: list[list[int]] = []
        parents = list(range(-1, self.stem - 1))
        children: dict[tuple[int, int], int] = {}
        for path in paths:
            place, places = self.stem - 1, []
            for token in path:
                child = children.setdefault((place, token), len(self.ids))
                if child == len(self.ids):
                    self.ids.append(token)
                    parents.append(place)
                place = child
                places.append(place)
            self.places.append(places)
        seen = torch.eye(len(self.ids), dtype=torch.bool)
        depth = [0] * len(self.ids)
        for place, parent in enumerate(parents):
            if parent >= 0:  # stands before its child, so its own row is done
                seen[place] |= seen[parent]
                depth[place] = depth[parent] + 1
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf).to(device)
        self.branches = Branches(torch.tensor(depth, device=device), mask)

    def before(self, path: int) -> list[int]:
        """Where in the pass the ids of a path are predicted, and what follows its last: stem needed, [ids + 1]."""
        return [self.stem - 1, *self.places[path]]
