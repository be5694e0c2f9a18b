"""What a stream attended to and what it kept, pass by pass, for tests that state a policy's choice in plain Python."""

from collections import Counter
from dataclasses import dataclass
from unittest import mock

from torch import Tensor

from streamh2o.kernels import plain
from streamh2o.stream import layer_attention
from streamh2o.stream.chunk_stream import ChunkStream


@dataclass
class Pass:
    """One pass of one layer and KV head: tokens are numbered by their place in the stream.

    before: tokens in the cache before the eviction, the pass's own included. kept: those after it. received: attention
    each token has had since the start, from all queries of the head's group; newest: the same from the last queries of
    this pass alone.
    """

    before: list[int]
    kept: list[int]
    received: Counter
    newest: Counter


def probed(stream: ChunkStream, ids) -> list[tuple[list[list[int]], Tensor]]:
    """What a probe of `ids` [1, C] attends to: for each layer the tokens of its slots, by KV head, and the attention
    [kv_heads, group, C, slots]."""
    seen = []

    def look(*arguments):
        output, probabilities = plain.attend(*arguments)
        layer = stream.cache.slots[len(seen)]
        seen.append((layer.source_index[0, :, : layer.used].tolist(), probabilities[0]))
        return output, probabilities

    with mock.patch.object(layer_attention, "attend", look):
        stream.probe(ids)
    return seen


def watch(model, policy, ids, chunk, newest=1) -> list[dict[tuple[int, int], Pass]]:
    """Feed `ids` [1, count] in chunks; every pass as {(layer, kv_head): Pass}."""
    received: dict[tuple[int, int], Counter] = {}
    passes = []
    with ChunkStream(model, policy, chunk=chunk) as stream:
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            seen = probed(stream, part)
            stream.feed(part)
            now = {}
            for number, (tokens, attention) in enumerate(seen):
                layer = stream.cache.slots[number]
                for head, before in enumerate(tokens):
                    total = received.setdefault((number, head), Counter())
                    late = Counter()
                    for slot, token in enumerate(before):
                        total[token] += float(attention[head, :, :, slot].sum())
                        late[token] = float(attention[head, :, -newest:, slot].sum())
                    kept = layer.source_index[0, head, : layer.used].tolist()
                    now[number, head] = Pass(before, kept, Counter(total), late)
            passes.append(now)
    return passes


def by(tokens, *, most_of, count) -> set[int]:
    """The `count` tokens with the largest `most_of(token)`."""
    return set(sorted(tokens, key=most_of, reverse=True)[:count])


def evicting(passes) -> list[Pass]:
    """Every layer and head of the passes that evicted something."""
    found = [one for now in passes for one in now.values() if len(one.before) > len(one.kept)]
    assert found, "nothing was evicted, the test would show nothing"
    return found
