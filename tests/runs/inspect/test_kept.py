"""What `inspect` counts, against plain recounts from the slots themselves."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamh2o.errors import UsageError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs.inspect import places
from streamh2o.runs.inspect.cache_contents import inspect_source
from streamh2o.runs.inspect.excerpts import FOLD, read_excerpts, token_texts
from streamh2o.runs.inspect.kept import AGE_EDGES, CacheWatch
from streamh2o.runs.inspect.places import AROUND, Places
from streamh2o.runs.options import RunOptions
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.text.reader import TokenReader
from streamh2o.text.rereadable import Rereadable
from streamh2o.text.sources import open_inputs
from tests.tiny import llama, tokens
from tests.tiny_folder import TEXT, make_folder
from tests.watch import watch

CHUNK = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("model"))), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory):
    return load_model(str(make_folder(tmp_path_factory.mktemp("bos"), bos=True)), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """CR LF, letters of several bytes, and characters of which a token is a part."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes("".join(f"{n}. {TEXT}Élan naïve 🎈 漢字!\r\n" for n in range(24)).encode())
    return path


class _Block:
    def __init__(self, first: int, count: int) -> None:
        self.byte_offset = np.arange(first, first + count)


def stream_and_recount(policy, count=203):
    """What `CacheWatch` says of a stream, and what the slots say after each of its evictions."""
    ids, model = tokens(count), llama()
    snapshots = []
    with ChunkStream(model, policy, chunk=CHUNK) as stream:
        looking = CacheWatch(stream)
        for start in range(0, count, CHUNK):
            part = ids[:, start : start + CHUNK]
            before = stream.evictions
            stream.feed(part)
            looking.look(_Block(start, part.shape[1]), start + part.shape[1])
            if stream.evictions > before:
                snapshots.append((stream.tokens, hitters(stream)))
        return looking.kept(bos=False), snapshots, hitters(stream)


def hitters(stream) -> dict[tuple[int, int], list[int]]:
    found = {}
    for number, layer in enumerate(stream.cache.slots):
        for head, slots in enumerate(layer.source_index[0, :, : layer.used].tolist()):
            found[number, head] = slots[stream.policy.sinks : layer.used - stream.policy.recent]
    return found


def bin_of(age: int) -> int:
    return max(number for number, edge in enumerate(AGE_EDGES.tolist()) if edge <= age)


@pytest.mark.parametrize("name", ["streamh2o", "h2o", "h2-only", "topk+h2", "sparse-strided+h2", "spatten"])
def test_every_count_is_that_of_a_plain_recount(name):
    kept, snapshots, now = stream_and_recount(make_policy(name, cache=40))
    assert len(snapshots) > 5
    assert {(n, h): kept.index[n, h].tolist() for n, h in now} == now
    pairs = Counter(token for those in now.values() for token in those)
    held = kept.held_tokens()
    assert dict(zip(held.token.tolist(), held.pairs.tolist(), strict=True)) == pairs
    for row, token in enumerate(held.token.tolist()):
        layers = Counter(layer for (layer, _), those in now.items() if token in those)
        assert held.by_layer[row].tolist() == [layers[0], layers[1]]
    most = held.token[held.most_held(5)].tolist()
    assert [pairs[token] for token in most] == sorted(pairs.values(), reverse=True)[:5]
    for (layer, head), those in now.items():
        wanted = np.quantile([kept.tokens - 1 - token for token in those], [0.05, 0.25, 0.5, 0.75, 0.95])
        assert kept.age_quantiles()[layer, head] == pytest.approx(wanted)
        edges, counts = kept.positions(7, 12)
        inside = [sum(a <= token < b for token in those) for a, b in pairwise(edges)]
        assert counts[layer, head].tolist() == inside


@pytest.mark.parametrize("name", ["streamh2o", "h2o", "h2-only"])
def test_survival_is_that_of_a_plain_recount(name):
    policy = make_policy(name, cache=40)
    kept, snapshots, _ = stream_and_recount(policy)
    held, could, before, stayed = (Counter() for _ in range(4))
    last = None
    for seen, now in snapshots:
        for (layer, head), those in now.items():
            held.update((layer, bin_of(seen - 1 - token)) for token in those)
            for token in last[layer, head] if last else ():
                before[bin_of(seen - 1 - token)] += 1
                stayed[bin_of(seen - 1 - token)] += token in those
        could.update(bin_of(seen - 1 - token) for token in range(policy.sinks, seen - policy.recent))
        last = now
    survival, bins = kept.survival, range(len(AGE_EDGES) - 1)
    assert survival.held.tolist() == [[held[layer, b] for b in bins] for layer in range(2)]
    assert survival.could.tolist() == [could[b] for b in bins]
    assert survival.before.tolist() == [before[b] for b in bins]
    assert survival.stayed.tolist() == [stayed[b] for b in bins]
    assert 0 < survival.stay_mean == sum(stayed.values()) / sum(before.values()) < 1


@pytest.mark.parametrize("name", ["h2o", "topk"])
def test_rank_one_is_what_has_the_most_attention(name):
    policy, ids = make_policy(name, cache=40), tokens(150)
    last = watch(llama(), policy, ids, CHUNK, newest=getattr(policy, "newest", 1))[-1]
    kept, _, _ = stream_and_recount(policy, count=150)
    for (layer, head), now in last.items():
        score = now.newest if name == "topk" else now.received
        order = [token for _, token in sorted(zip(kept.rank[layer, head], kept.index[layer, head], strict=True))]
        scores = [score[int(token)] for token in order]
        assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)


def test_a_policy_that_keeps_nothing_is_refused():
    policy = make_policy("recompute", cache=40)
    with ChunkStream(llama(), policy, chunk=CHUNK) as stream, pytest.raises(UsageError, match="recompute"):
        CacheWatch(stream)


@given(st.data())
def test_places_of_what_is_held_and_its_surroundings_are_never_lost(data):
    """And of the others few are kept, however long the stream."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    sinks, window, slots = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 30)), data.draw(st.integers(1, 5))
    found, held, starts = Places(), np.zeros(0, np.int64), np.zeros(0, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_SLACK", 10)
        for _ in range(data.draw(st.integers(1, 30))):
            new = (starts[-1] + 1 if len(starts) else 0) + np.cumsum(rng.integers(0, 4, size=rng.integers(1, 60)))
            found.add(new, int(new[-1]) + 1)
            starts = np.append(starts, new)
            could = np.append(held, np.arange(len(starts) - len(new), len(starts)))
            held = np.sort(rng.choice(could, min(slots, len(could)), replace=False))
            found.prune(held, sinks, len(starts) - window)
            bound = (slots + sinks) * (2 * AROUND + 1) + window + AROUND
            assert len(found) <= 2 * bound + 10 + len(new)
    assert found.of(held).tolist() == starts[held].tolist()
    for token in held.tolist():
        first, stop = max(0, token - AROUND + 1), min(len(starts), token + AROUND - 1)
        ends = np.append(starts, found.end)
        assert found.borders(first, stop).tolist() == ends[first : stop + 1].tolist()


def all_starts(loaded, book):
    """The first byte of every token of the book, and the byte after the last."""
    with TokenReader(open_inputs([book])[0], loaded.tokenizer) as reader:
        blocks = list(reader.blocks(1000))
    return np.append(np.concatenate([block.byte_offset for block in blocks]), book.stat().st_size)


@pytest.mark.parametrize("name", ["streamh2o", "h2o", "streamingllm", "full", "h2-only"])
@pytest.mark.parametrize("which", ["loaded", "with_bos"])
def test_the_excerpts_are_the_books_text_and_show_every_held_token(request, book, name, which):
    loaded = request.getfixturevalue(which)
    source = open_inputs([book])[0]
    found = inspect_source(loaded, source, make_policy(name, cache=48), RunOptions(chunk=32, max_tokens=450))
    kept, held = found.kept, found.held
    starts, data = all_starts(loaded, book), book.read_bytes()
    assert kept.bos == (which == "with_bos")
    shown = set()
    for part in found.excerpts.parts:
        assert [unit.first for unit in part.units] + [part.stop] == [part.first] + [u.stop for u in part.units]
        for unit in part.units:
            cut = unit.first == part.first or unit.stop == part.stop
            raw = data[starts[unit.first] : starts[unit.stop]]
            assert unit.text == raw.decode(errors="ignore" if cut else "strict")
            shown.update(range(unit.first, unit.stop))
    assert found.excerpts.least == 1
    assert set(held.token.tolist()) <= shown
    assert set(range(kept.sinks)) | set(range(kept.tokens - kept.recent, kept.tokens)) <= shown
    for row, text in enumerate(found.texts):
        at = int(held.token[row])
        assert data[starts[at] : starts[at + 1]].decode(errors="ignore") in text
    for each in found.most_held:
        assert each.before + each.text + each.after in data.decode()
    for a, b in pairwise(found.excerpts.parts):
        assert b.first - a.stop > FOLD


def test_a_capped_text_leaves_out_what_the_fewest_hold(loaded, book):
    source, policy = open_inputs([book])[0], make_policy("h2o", cache=48)
    found = inspect_source(loaded, source, policy, RunOptions(chunk=32))
    kept, held = found.kept, found.held
    most = sum(part.stop - part.first for part in found.excerpts.parts) * 2 // 3
    with Rereadable(source) as text:
        few = read_excerpts(kept, held, text, most)
        assert list(token_texts(kept, held, text)) == found.texts
    assert few.least > 1
    assert sum(part.stop - part.first for part in few.parts) <= most
    shown = {token for part in few.parts for token in range(part.first, part.stop)}
    assert set(held.token[held.pairs >= few.least].tolist()) <= shown


def test_a_stream_is_the_same_whether_it_is_watched_or_not(loaded, book):
    source, policy = open_inputs([book])[0], make_policy("topk", cache=48)
    found = inspect_source(loaded, source, policy, RunOptions(chunk=32))
    from tests.perplexity import run_perplexity

    plain = run_perplexity(loaded, source, policy, RunOptions(chunk=32))
    assert found.result["nll_sum"] == plain["nll_sum"]
    assert torch.is_grad_enabled()
