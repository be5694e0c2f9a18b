"""What the commands with `--checkpoint` share: which run is saved where, and whether it is the one to go on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.text.sources import Source


@dataclass(frozen=True)
class Machine:
    """Which model runs on what and how, field by field as the options of these names say."""

    model: str
    dtype: str
    device: str
    threads: int | None
    kernel: str
    trust_remote_code: bool
    device_map: str | None = None
    weights: str = "plain"

    def load(self) -> Loaded:
        from streamh2o.models.load import load_model

        return load_model(
            self.model,
            self.dtype,
            self.device,
            self.trust_remote_code,
            device_map=self.device_map,
            weights=self.weights,
        )


def open_keeper(folder: Path | None, every: str, resume: bool, tell: Callable[[str], None]) -> Keeper | None:
    """The keeper of a run, None where it is not to be saved. Raises UsageError for --resume without a folder."""
    from streamh2o.errors import UsageError

    if folder is None:
        if resume:
            raise UsageError("--resume goes on from a folder; name it with --checkpoint DIR.")
        return None
    from streamh2o.runs.saving.keeper import Keeper

    return Keeper(folder, every, resume, tell)


def settle(
    machine: Machine,
    keeper: Keeper | None,
    sources: Sequence[Source],
    options: dict[str, Any],
    outputs: dict[str, Path | None],
) -> Machine:
    """Set threads and kernel; with a keeper see, before the model is loaded, whether the checkpoint is of this run.

    options: by name, all but the machine's. outputs: those that grow. Returns the machine with what `auto` stands for.
    """
    import torch

    from streamh2o.cli import processor
    from streamh2o.errors import UsageError
    from streamh2o.kernels.compiled import chosen

    if keeper is None:
        processor.use(machine.threads, machine.kernel, machine.device)
        return machine
    if machine.device_map is not None:
        raise UsageError("--checkpoint saves what is on one device; leave it or --device-map out.")
    from streamh2o.models.device import choose_device, choose_dtype
    from streamh2o.models.find import model_folder
    from streamh2o.models.load import fingerprint, quiet_transformers, tell
    from streamh2o.runs.saving.keeper import describe

    dtype, device, threads, kernel = keeper.place(machine.dtype, machine.device, machine.threads, machine.kernel)
    processor.use(threads, kernel, device)
    place = choose_device(device)
    number = str(choose_dtype(dtype, place, machine.weights)).removeprefix("torch.")
    with quiet_transformers():
        folder = model_folder(machine.model, trust_remote_code=machine.trust_remote_code, tell=tell)
    where = {"dtype": number, "device": str(place), "threads": torch.get_num_threads(), "kernel": chosen()}
    if machine.weights != "plain":
        where["weights"] = machine.weights  # else not named, so that older checkpoints stay good
    options = {**options, **where}
    keeper.check(describe(sources, options, (machine.model, fingerprint(folder))), outputs)
    return replace(machine, dtype=number, device=device, threads=threads)
