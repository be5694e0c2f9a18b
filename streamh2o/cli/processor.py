"""How a command uses the processor: threads and the compiled kernel."""

from __future__ import annotations

import torch

from streamh2o.kernels import compiled as kernel
from streamh2o.machine import physical_cores
from streamh2o.models.device import choose_device
from streamh2o.models.load import tell


def use(threads: int | None, kernel_name: str = "auto", device: str = "auto") -> None:
    """Compute on so many threads (None: all cores) with the kernel of that name on `device`, see `kernel.choose`."""
    torch.set_num_threads(threads or physical_cores())
    kernel.choose(kernel_name, tell, choose_device(device))
