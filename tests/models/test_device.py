"""`--device auto` and `--dtype auto`: by what the machine has, never by how fast it happens to be."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamh2o.errors import UsageError, UserError
from streamh2o.models import device as hardware
from streamh2o.models.load import load_model
from tests import model_folders

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fake_cpu(monkeypatch, capability: str, flags: set[str]) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "cpu_flags", lambda: flags)


@pytest.mark.parametrize("weights", ["plain", "packed"])
@pytest.mark.parametrize(
    ("capability", "flags", "chosen"),
    [
        ("AVX512", {"avx512_bf16", "amx_bf16"}, torch.bfloat16),
        ("AVX512", {"avx512_bf16"}, torch.float32),
        ("AVX512", {"avx512f"}, torch.float32),
        ("AVX2", {"avx512_bf16", "amx_bf16"}, torch.float32),
        ("DEFAULT", set(), torch.float32),
    ],
)
def test_auto_on_a_cpu_is_bfloat16_only_with_amx(monkeypatch, capability, flags, chosen, weights):
    fake_cpu(monkeypatch, capability, flags)
    assert hardware.choose_dtype("auto", CPU, weights) == chosen


@pytest.mark.parametrize(
    ("capability", "chosen"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_on_cuda_goes_by_the_compute_capability(monkeypatch, capability, chosen):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert hardware.choose_dtype("auto", CUDA) == chosen


@pytest.mark.parametrize(
    ("name", "chosen"), [("gfx90a:sramecc+", torch.bfloat16), ("gfx1100", torch.bfloat16), ("gfx906", torch.float32)]
)
def test_auto_on_rocm_goes_by_the_name_of_the_architecture(monkeypatch, name, chosen):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    assert hardware.choose_dtype("auto", CUDA) == chosen


def test_auto_on_what_was_not_measured_is_float32():
    assert hardware.choose_dtype("auto", torch.device("mps")) == torch.float32
    assert hardware.choose_dtype("auto", torch.device("xpu")) == torch.float32


def test_auto_goes_by_the_layout_of_the_weights_too(monkeypatch, tmp_path):
    fake_cpu(monkeypatch, "AVX512", {"amx_bf16"})
    row = hardware.AutoDtype(torch.float32, "as a test says")
    monkeypatch.setitem(hardware.AUTO, ("amx", "packed"), row)
    assert hardware.choose_dtype("auto", CPU, "packed") == torch.float32
    assert hardware.choose_dtype("auto", CPU) == torch.bfloat16
    assert load_model(str(model_folders.folder(tmp_path)), device="cpu").dtype == torch.bfloat16


def test_auto_times_nothing_and_leaves_threads_alone(monkeypatch):
    def fail(*_):
        raise AssertionError("--dtype auto ran a product or changed the threads")

    for name in ("set_num_threads", "ones", "randn", "matmul"):
        monkeypatch.setattr(torch, name, fail)
    monkeypatch.setattr(torch.nn.functional, "linear", fail)
    assert hardware.choose_dtype("auto", CPU) in (torch.float32, torch.bfloat16)


def test_a_format_asked_for_by_name_is_taken_on_any_device(monkeypatch):
    fake_cpu(monkeypatch, "DEFAULT", set())
    assert hardware.choose_dtype("bfloat16", CPU, "packed") == torch.bfloat16


def test_what_pytorch_tells_of_the_processor_agrees_with_linux():
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "flags" not in cpuinfo.read_text():
        pytest.skip("no x86 flags to compare with")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE).group(1).split()
    assert ("avx512_bf16" in hardware.cpu_flags()) == ("avx512_bf16" in flags)
    assert ("amx_bf16" in hardware.cpu_flags()) == ("amx_bf16" in flags)


def test_an_unknown_dtype_or_device_is_bad_usage():
    with pytest.raises(UsageError, match="--dtype 'int3' is unknown; use auto, float32, bfloat16, float16"):
        hardware.choose_dtype("int3", CPU)
    for name in ("tpu", "cpu:x", "", "meta"):
        with pytest.raises(UsageError, match=r"--device .* is unknown"):
            hardware.choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_sentence():
    assert hardware.choose_device("auto") == CPU
    for name in ("cuda", "cuda:7"):
        with pytest.raises(UserError, match="sees 0 GPUs here; use --device cpu"):
            hardware.choose_device(name)
