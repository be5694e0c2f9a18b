"""One thread: the small models of these tests lose more to waiting for each other than they gain."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start():
    """Starts `streamh2o` in a process of its own; see tests/programs.py."""
    from tests.programs import starter

    with starter() as begin:
        yield begin
