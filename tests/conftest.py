"""One thread: the small models of these tests lose more to waiting for each other than they gain.

And without a GPU Triton's interpreter, which has to be asked for before anything imports triton.
"""

import os

import pytest

try:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
except ImportError:
    pass


def pytest_collection_modifyitems(items):
    """The limit of pyproject.toml is for tests that take seconds; those that run the real model get hours."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3 * 3600))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
    from streamh2o.kernels.select import select

    select("auto")  # built now, if at all, so that no test meets the line that says so


@pytest.fixture(scope="session")
def start():
    """Starts `streamh2o` in a process of its own; see tests/programs.py."""
    from tests.programs import starter

    with starter() as begin:
        yield begin


@pytest.fixture
def streamh2o(capsys, monkeypatch):
    """Calls the command in this process; see tests/call.py."""
    from tests.call import call_streamh2o

    return call_streamh2o(capsys, monkeypatch)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with a tiny model of `transformers`, as `--model` takes it."""
    from tests.tiny_folder import make_folder

    return str(make_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def loaded(folder):
    """The model of `folder`, in float32."""
    from streamh2o.models.load import load_model

    return load_model(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def built():
    """Skips a test where the compiled kernel cannot be had; gives it else."""
    from streamh2o.errors import UserError
    from streamh2o.kernels.select import select

    try:
        return select("compiled")
    except UserError as reason:
        if "please report this" in str(reason):
            raise  # built, and wrong: no reason to skip
        pytest.skip(str(reason))
