"""Threads that share a model: each gets what it would get alone, or waits; and what is dropped gives the model back."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamh2o.kernels.select import select
from streamh2o.policies import make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.lending import attention_mask, cache_argument, lending_of
from streamh2o.stream.lm_head import FewRows, LmHead
from streamh2o.stream.stream_cache import StreamCache
from tests import families, tiny

ROUNDS = 10
CASES = {case.name: case for case in families.CASES}


def generate(model, ids, cache=None):
    arguments = {} if cache is None else {cache_argument(model): cache}
    return model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **arguments)


def with_cache(model, seed):
    with StreamCache.for_model(model, cache=16, chunk=8) as cache:
        return generate(model, tiny.tokens(20, seed=seed), cache)


def plainly(model, seed):
    return generate(model, tiny.tokens(20, seed=seed))


def streamed(model, seed):
    return tiny.stream_losses(model, make_policy("h2o", 16), tiny.tokens(60, seed=seed), 8)


def token_by_token(model, seed):
    return tiny.stream_losses(model, make_policy("h2o", 16), tiny.tokens(40, seed=seed), 20, evict="token")


JOBS = {"cache": with_cache, "plain": plainly, "stream": streamed, "evict token": token_by_token}


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt_neox, CASES["bloom"].model], ids=["llama", "neox", "bloom"])
@pytest.mark.parametrize(
    ("one", "other"), [("cache", "cache"), ("cache", "plain"), ("stream", "stream"), ("stream", "plain")]
)
def test_two_threads_on_one_model_get_what_each_gets_alone(build, one, other):
    model = build()
    jobs = (JOBS[one], 1), (JOBS[other], 2)
    alone = [job(model, seed) for job, seed in jobs]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(ROUNDS):
            together = [threads.submit(job, model, seed) for job, seed in jobs]
            for found, expected in zip(together, alone, strict=True):
                assert torch.equal(found.result(timeout=60), expected)


def test_all_kinds_of_use_at_once_on_one_model():
    model = tiny.llama()
    alone = {name: job(model, seed) for seed, (name, job) in enumerate(JOBS.items())}
    with ThreadPoolExecutor(len(JOBS)) as threads:
        for _ in range(ROUNDS):
            together = {name: threads.submit(job, model, seed) for seed, (name, job) in enumerate(JOBS.items())}
            for name, found in together.items():
                assert torch.equal(found.result(timeout=60), alone[name]), name


def test_a_pass_that_fails_in_one_thread_leaves_the_other_right():
    model, ids = tiny.llama(), tiny.tokens(60)
    expected = streamed(model, 0)
    layer = model.model.layers[1].mlp
    failing = threading.local()

    def fail_there(*_):
        if getattr(failing, "on", False):
            raise RuntimeError("broken")

    handle = layer.register_forward_pre_hook(fail_there)

    def fails():
        failing.on = True
        try:
            with ChunkStream(model, make_policy("h2o", 16), chunk=8) as stream, pytest.raises(RuntimeError):
                stream.feed(ids[:, :8])
            return True
        finally:
            failing.on = False

    try:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(ROUNDS):
                good, bad = threads.submit(streamed, model, 0), threads.submit(fails)
                assert bad.result(timeout=60)
                assert torch.allclose(good.result(timeout=60), expected, atol=1e-4)
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_is_dropped_without_an_end_gives_the_model_back(family):
    model, ids = tiny.FAMILIES[family](), tiny.tokens(20)
    attention = model.config._attn_implementation
    expected = tiny.dense_losses(model, ids)
    ChunkStream(model, make_policy("h2o", 8), chunk=4).feed(ids[:, :4])
    cache = StreamCache.for_model(model, cache=8)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    del cache
    gc.collect()
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert model.config._attn_implementation == attention
    assert torch.equal(tiny.dense_losses(model, ids), expected)


def test_a_model_that_is_dropped_with_its_stream_is_garbage():
    import weakref

    model = tiny.llama()
    stream = ChunkStream(model, make_policy("h2o", 8), chunk=4)
    stream.feed(tiny.tokens(4))
    reference = weakref.ref(model)
    del model, stream
    gc.collect()
    assert reference() is None


def test_a_stream_that_the_collector_drops_waits_for_no_other_thread():
    model, ids = tiny.llama(), tiny.tokens(4)
    streams = [ChunkStream(model, make_policy("h2o", 8), chunk=4)]
    lock, held, dropped = streams[0]._lending.lock, threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            assert dropped.wait(timeout=10)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        assert held.wait(timeout=10)
        streams.clear()
        dropped.set()
        holding.result()
    tiny.dense_losses(model, ids)
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_models_that_get_a_stream_in_other_threads_do_not_disturb_a_pass():
    others, before = [tiny.llama(layers=1) for _ in range(100)], sys.getswitchinterval()

    def lend():
        for other in others:
            lending_of(other)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            lending = threads.submit(lend)
            while not lending.done():
                assert attention_mask(config=None) is None
            lending.result()
    finally:
        sys.setswitchinterval(before)


def test_a_plain_call_while_a_model_gets_its_first_stream_is_right(monkeypatch):
    model, ids, found = tiny.llama(), tiny.tokens(20), []
    expected, own = tiny.dense_losses(model, ids), model.set_attn_implementation
    with ThreadPoolExecutor(1) as threads:

        def try_it(name):
            own(name)
            found.append(threads.submit(tiny.dense_losses, model, ids).result(timeout=60))

        monkeypatch.setattr(model, "set_attn_implementation", try_it)
        ChunkStream(model, make_policy("h2o", 8), chunk=4).close()
    assert len(found) == 2
    assert all(torch.equal(losses, expected) for losses in found)


def test_models_that_share_a_configuration_are_lent_one_at_a_time():
    models = [tiny.llama()]
    models.append(tiny.build(models[0].config))
    assert models[0].model.config is models[1].model.config
    attention = models[0].config._attn_implementation
    plain = tiny.build(models[0].config)  # which is never lent anything
    expected, alone = [streamed(model, 0) for model in models], plainly(plain, 1)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(ROUNDS):
            found = [threads.submit(streamed, model, 0) for model in models]
            beside = threads.submit(plainly, plain, 1)
            assert all(torch.equal(each.result(timeout=60), right) for each, right in zip(found, expected, strict=True))
            assert torch.equal(beside.result(timeout=60), alone)
    assert models[0].config._attn_implementation == attention


@pytest.mark.usefixtures("built")
def test_losses_are_the_same_while_another_thread_is_in_a_decode_step():
    model, kernel = tiny.llama().bfloat16(), select("compiled")
    random = torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(40, 64, generator=random).bfloat16(), torch.arange(40)
    expected = LmHead(model, kernel).losses(hidden, targets)
    few = FewRows(model, kernel)
    few.on()
    assert "forward" in vars(model.lm_head)
    assert torch.equal(LmHead(model, kernel).losses(hidden, targets), expected)
