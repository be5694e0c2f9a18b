import subprocess
import sys

import pytest
import torch

from streamh2o.errors import UserError, naming_memory, out_of_memory


def test_what_torch_raises_on_the_cpu_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert out_of_memory(raised.value)


def test_the_types_that_say_so_are_recognised_whatever_their_message():
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA: 3 GiB are wanted"))
    assert out_of_memory(torch.cuda.OutOfMemoryError("HIP"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("an illegal memory access was encountered"),
        RuntimeError("view size is not compatible with input tensor's size (memory format)"),
        RuntimeError("out of memory"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyError("memory"),
    ],
)
def test_the_word_memory_alone_does_not_make_it_one(error):
    assert not out_of_memory(error)
    with pytest.raises(type(error)), naming_memory("the run"):
        raise error


def test_memory_that_runs_out_is_named_in_one_sentence():
    with pytest.raises(UserError) as raised, naming_memory("the run"):
        torch.empty(10**15)
    assert str(raised.value) == "the run; free some, or use a smaller --chunk, --cache or model."


def test_errors_are_told_apart_without_importing_torch():
    code = (
        "import sys; from streamh2o.errors import out_of_memory; "
        "assert out_of_memory(MemoryError()) and not out_of_memory(RuntimeError('memory')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
