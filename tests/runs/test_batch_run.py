"""Inputs side by side give what each gives alone."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from streamh2o.errors import UserError
from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs.batch_run import BatchRun
from streamh2o.runs.interrupt import Interrupt
from streamh2o.runs.options import RunOptions
from streamh2o.stream.batched import feed_together
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.text import open_inputs
from tests import tiny
from tests.call import one_sentence
from tests.perplexity import run_perplexity
from tests.tiny_folder import TEXT, make_folder

LINES = (9, 2, 0, 14, 5)  # of each document; the third is empty
SMALL = ("--chunk", "16", "--cache", "48", "--dtype", "float32", "--device", "cpu", "--threads", "1")
NOT_ALONE = {
    "seconds",
    "tokens_per_second",
    "peak_rss_bytes",
    "nll_sum",
    "nll_mean",
    "ppl",
    "bits_per_byte",
    "ppl_word",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model"), bos=True))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, lines in enumerate(LINES):
        (folder / f"{number}.txt").write_text("".join(f"{number * line}. {TEXT}" for line in range(lines)))
    return [folder / f"{number}.txt" for number in range(len(LINES))]


def run_batch(loaded, sources, policy, options, size):
    batch, losses = BatchRun(loaded, sources, policy, options, size), {}
    for number, progress in batch.chunks():
        losses.setdefault(number, []).append(progress.losses)
    return batch.results, {number: np.concatenate(parts) for number, parts in losses.items()}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("policy", ["streamh2o", "h2o", "streamingllm", "recompute", "spatten", "topk+h2"])
def test_streams_of_different_ages_in_one_pass_get_the_losses_of_each_alone(family, policy):
    model, lengths = tiny.FAMILIES[family](), (150, 70, 33)
    texts = [tiny.tokens(length, seed=length) for length in lengths]
    alone = [tiny.stream_losses(model, make_policy(policy, 32), text, 16) for text in texts]
    streams = [ChunkStream(model, make_policy(policy, 32), chunk=16) for _ in texts]
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    at = [0, -16, -48]  # the second begins a chunk later, the third three chunks
    while any(place < len(text[0]) for place, text in zip(at, texts, strict=True)):
        now = [row for row, text in enumerate(texts) if 0 <= at[row] < len(text[0])]
        fed = feed_together([streams[row] for row in now], [texts[row][:, at[row] : at[row] + 16] for row in now])
        for row, each in zip(now, fed, strict=True):
            got[row].append(each.losses)
        at = [place + 16 for place in at]
    for row, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat(got[row], dim=1), expected, atol=2e-5, rtol=1e-5)
        assert streams[row].max_slots == 32
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"evict": "token"}, {"kv_bits": 8}, {"per_head": "query"}, {"max_tokens": 100}],
    ids=lambda options: "-".join(map(str, options)) or "plain",
)
def test_each_input_of_a_batch_has_the_result_of_a_run_of_its_own(model, documents, options):
    loaded = load_model(model, dtype="float32", device="cpu")
    policy, how = make_policy("streamh2o", cache=48), RunOptions(chunk=16, **options)
    sources = open_inputs(documents)
    for size in (2, 4, 9):
        results, losses = run_batch(loaded, sources, policy, how, size)
        assert sorted(results) == list(range(len(LINES)))
        for number, source in enumerate(sources):
            parts = []
            alone = run_perplexity(loaded, source, policy, how, [lambda progress, parts=parts: parts.append(progress)])
            mine = results[number]
            assert mine.pop("batch") == size
            assert {k: v for k, v in mine.items() if k not in NOT_ALONE} == {
                k: v for k, v in alone.items() if k not in NOT_ALONE
            }
            if alone["scored"]:
                expected = np.concatenate([part.losses for part in parts])
                assert losses[number] == pytest.approx(expected, abs=2e-5)
                assert mine["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6)


def test_a_display_is_told_of_all_inputs_together(model, documents):
    loaded = load_model(model, dtype="float32", device="cpu")
    sources = open_inputs(documents)
    batch = BatchRun(loaded, sources, make_policy("streamh2o", cache=48), RunOptions(chunk=16), 2)
    seen = [batch.progress() for _ in batch.chunks()]
    assert [part.token for part in seen] == sorted(part.token for part in seen)
    assert seen[-1].token == sum(result["tokens"] for result in batch.results.values())
    assert seen[-1].fraction == 1
    nll, scored = (sum(result[key] for result in batch.results.values()) for key in ("nll_sum", "scored"))
    assert seen[-1].ppl == pytest.approx(np.exp(nll / scored))


def test_an_input_that_fails_stops_all_and_what_was_finished_is_there(model, documents, tmp_path):
    loaded = load_model(model, dtype="float32", device="cpu")
    (tmp_path / "latin1.txt").write_bytes(TEXT.encode() + b"\xff")
    sources = open_inputs([documents[1], tmp_path / "latin1.txt", documents[3], documents[4]])
    batch = BatchRun(loaded, sources, make_policy("streamh2o", cache=48), RunOptions(chunk=16), 3)
    with pytest.raises(UserError, match=r"latin1\.txt"):
        for _ in batch.chunks():
            pass
    assert {number: result["complete"] for number, result in batch.results.items()} == {0: False, 1: False, 2: False}
    whole = RunOptions(chunk=16, max_tokens=batch.results[2]["tokens"])
    alone = run_perplexity(loaded, sources[2], make_policy("streamh2o", cache=48), whole)
    assert batch.results[2]["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6)


def test_an_interrupted_batch_tells_what_it_finished_of_each(model, documents):
    class Stop(Interrupt):
        def __init__(self, after):
            super().__init__()
            self.after = after

        @property
        def requested(self):
            self.after -= 1
            return self.after < 0

        @requested.setter
        def requested(self, value):
            """It is asked, not told."""

        def waiting(self):
            return nullcontext()

    loaded, policy = load_model(model, dtype="float32", device="cpu"), make_policy("streamh2o", cache=48)
    sources = open_inputs(documents[3:])
    batch = BatchRun(loaded, sources, policy, RunOptions(chunk=16), 2)
    assert len(list(batch.chunks(Stop(after=5)))) == 10
    for number, result in batch.results.items():
        alone = run_perplexity(loaded, sources[number], policy, RunOptions(chunk=16, max_tokens=79))  # and a BOS
        assert (result["complete"], result["tokens"]) == (False, 79)
        assert result["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6)


def test_a_text_too_long_for_full_is_refused_by_name(model, documents):
    loaded = load_model(model, dtype="float32", device="cpu")
    batch = BatchRun(loaded, open_inputs(documents[3:]), make_policy("full", cache=48), RunOptions(chunk=256), 2)
    with pytest.raises(UserError, match=r"3\.txt: The text is longer than the 512 tokens"):
        for _ in batch.chunks():
            pass


def test_on_the_command_line_a_batch_changes_the_order_of_nothing(streamh2o, model, documents, tmp_path):
    written = {}
    for size in (1, 3):
        files = [tmp_path / f"{size}{end}" for end in (".json", ".npy", ".jsonl", ".svg")]
        options = [
            part for pair in zip(("--json", "--nll-out", "--log", "--plot"), files, strict=True) for part in pair
        ]
        code, out, err = streamh2o("ppl", *documents, "--model", model, *SMALL, "--batch", size, *options)
        assert code == 0
        assert "2.txt: is empty" in err
        written[size] = [json.loads(line) for line in files[0].read_text().splitlines()], np.load(files[1]), out
        lines = [json.loads(line) for line in files[2].read_text().splitlines()]
        for result in written[size][0]:
            mine = [line for line in lines if line["input"] == result["input"]["name"]]
            assert sum(line["n"] for line in mine) == result["scored"]
    (alone, losses, _), (together, mixed, out) = written[1], written[3]
    assert [result["input"] for result in together] == [result["input"] for result in alone]
    assert mixed == pytest.approx(losses, abs=2e-5)
    assert "3 inputs at a time" in out


def test_a_batch_and_a_checkpoint_or_another_definition_are_refused_in_one_sentence(
    streamh2o, model, documents, tmp_path
):
    for extra, said in (
        (("--checkpoint", tmp_path / "c"), "--checkpoint saves one input at a time; leave it or --batch out"),
        (("--ppl-def", "hf"), "--batch belongs to --ppl-def stream"),
        (("--rows",), "--rows"),
    ):
        code, _, err = streamh2o("ppl", *documents, "--model", model, "--batch", 2, *extra)
        assert code == 2
        assert said in one_sentence(err)


def test_rows_of_a_data_set_are_inputs_of_their_own(streamh2o, model, tmp_path):
    rows = [TEXT * 3, None, "", TEXT]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    name = f"hf:{tmp_path}:train:text"
    code, out, _ = streamh2o("ppl", name, "--rows", "--batch", 4, "--model", model, *SMALL, "--json", "-")
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["input"]["name"] for result in results] == [f"{name}#0", f"{name}#3"]
    assert [result["input"]["bytes"] for result in results] == [3 * len(TEXT), len(TEXT)]
