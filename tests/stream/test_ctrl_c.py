"""Ctrl-C at any point of a pass: the model is its own afterwards, and what was cut off is right or refused."""

import sys

import pytest
import torch

from streamh2o.errors import UserError
from streamh2o.stream.lending import cache_argument
from streamh2o.stream.stream import Stream
from streamh2o.stream.stream_cache import StreamCache
from tests import tiny

IDS = tiny.tokens(48)
EVERY = 13  # of the points where Python looks for signals one is tried in so many


class _CtrlC:
    """Raises KeyboardInterrupt inside its block at point `at` of those where Python looks for signals."""

    def __init__(self, at: int | None) -> None:
        self.at, self.points = at, 0

    def _look(self, frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self.points += 1
            if self.points == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind, *_):
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # which torch's own blocks can leave off
        return kind is KeyboardInterrupt


@torch.no_grad()
def plain(model):
    return model(IDS).logits


class Decoding:
    """A prompt of 24 tokens, then 3 decode steps, the first of which evicts; 21 more at once."""

    policy = "h2o"

    def __init__(self, model):
        self.model = model
        self.stream = StreamCache.for_model(model, cache=22, policy=self.policy, chunk=24, evict_every=2)
        self.at = 0

    @torch.no_grad()
    def read(self, count):
        logits = self.model(IDS[:, self.at : self.at + count], **{cache_argument(self.model): self.stream}).logits
        self.at += count
        return logits

    def begin(self):
        self.read(24)

    def middle(self):
        for _ in range(3):
            self.read(1)

    def catch_up(self):
        self.at = self.stream.tokens
        while self.at < 27:
            self.read(1)

    def end(self):
        return self.read(21)

    def close(self):
        self.stream.detach()


class UnscoredDecoding(Decoding):
    policy = "streamingllm"


class Prompt(Decoding):
    def middle(self):
        self.read(3)

    def catch_up(self):
        self.at = self.stream.tokens
        if self.at == 24:
            self.read(3)


class Streaming:
    def __init__(self, model):
        self.stream = Stream(model, cache=22, policy="h2o", chunk=24)

    def begin(self):
        self.stream.feed(IDS[0, :24])

    def middle(self):
        self.stream.feed(IDS[0, 24:27])

    def catch_up(self):
        self.stream.finish()  # what waits
        if self.stream.tokens == 24:
            self.middle()

    def end(self):
        self.stream.feed(IDS[0, 27:])
        return self.stream.losses

    def close(self):
        self.stream.close()


def right_or_refused(use):
    """What the end gives; None where it is refused since a part was cut off."""
    refusals = []
    try:
        use.catch_up()
        return use.end()
    except UserError as error:
        refusals.append(str(error))
    assert all("cut off" in each for each in refusals)
    return None


def points(kind, model):
    use = kind(model)
    use.begin()
    with _CtrlC(None) as ctrl_c:
        use.middle()
    use.close()
    return ctrl_c.points


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of generators that are cut off
@pytest.mark.parametrize("kind", [Decoding, UnscoredDecoding, Prompt, Streaming])
def test_ctrl_c_anywhere_in_a_pass_leaves_a_right_model_and_a_right_or_refused_cache(kind):
    model = tiny.llama()
    expected_logits, use = plain(model), kind(model)
    use.begin()
    use.middle()
    expected = use.end()
    use.close()
    for at in range(1, points(kind, model), EVERY):
        use = kind(model)
        use.begin()
        with _CtrlC(at) as ctrl_c:
            use.middle()
        if ctrl_c.points < at:
            use.close()
            continue  # compiled or measured once, and not again
        assert torch.equal(plain(model), expected_logits), at
        found = right_or_refused(use)
        assert found is None or torch.equal(found, expected), at
        use.close()
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [], at
