"""Once a cache is full, the host can give the device pass after pass without waiting for a result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamh2o.policies import POLICIES, make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from tests.tiny import VOCABULARY, llama

WAITED_FOR = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "argwhere", "_unique2"}


class Waits(TorchDispatchMode):
    """Collects the operations whose results, or their sizes, the host has to know."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        name = operation.overloadpacket.__name__
        by_mask = name.startswith("index") and isinstance(arguments[1], (list, tuple))
        if name in WAITED_FOR or (by_mask and any(i is not None and i.dtype == torch.bool for i in arguments[1])):
            self.found.append(name)
        return operation(*arguments, **(options or {}))


def full(model, policy):
    """A stream whose cache has evicted, and more of its text."""
    parts = torch.randint(0, VOCABULARY, (1, 256), generator=torch.Generator().manual_seed(0)).split(32, dim=1)
    stream = ChunkStream(model, make_policy(policy, 64), chunk=32)
    for part in parts[:4]:
        stream.feed(part)
    return stream, parts[4:]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_check_of_the_losses_asks_for_a_result(policy):
    stream, parts = full(llama().bfloat16(), policy)  # which a CPU attends to as a GPU does
    with stream, Waits() as waits:
        for part in parts:
            stream.feed(part)
    assert waits.found == ["is_nonzero"] * len(parts), "and on a GPU even that is left out"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_is_never_waited_for(policy):
    stream, parts = full(llama().to("cuda"), policy)
    with stream:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for part in parts:
                stream.feed(part)
        finally:
            torch.cuda.set_sync_debug_mode("default")
