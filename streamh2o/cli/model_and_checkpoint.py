"""Which model a command runs on what, and where the run is saved: options, loading, and going on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamh2o.cli.values import folder, one_of
from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from streamh2o.kernels.select import Kernel
    from streamh2o.models.loaded import Loaded
    from streamh2o.runs.saving.keeper import Keeper
    from streamh2o.text.sources import Source

_MODEL, _CHECKPOINT = "Model", "Checkpoint"


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs on what, and how."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            rich_help_panel=_MODEL,
            help="A name (see `streamh2o models`), a Hugging Face folder, a .gguf file or a hub id.",
        ),
    ] = "smollm2-135m"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16|float16",
            callback=one_of("--dtype", "auto", "float32", "bfloat16", "float16"),
            rich_help_panel=_MODEL,
            help="Number format; auto is bfloat16 where the processor has fast instructions for it, else float32.",
        ),
    ] = "auto"
    weights: Annotated[
        str,
        typer.Option(
            metavar="plain|packed",
            callback=one_of("--weights", "plain", "packed"),
            rich_help_panel=_MODEL,
            help="packed keeps the matrices of a GGUF file (Q2_K to Q8_0, IQ4_NL) in its blocks, on a CPU: the same "
            "numbers in a fraction of the memory; text is generated faster, in bfloat16 it is read more slowly.",
        ),
    ] = "plain"
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", rich_help_panel=_MODEL, help="auto, cpu, cuda, cuda:N or mps; auto takes a GPU."
        ),
    ] = "auto"
    device_map: Annotated[
        str | None,
        typer.Option(
            "--device-map",
            metavar="auto",
            rich_help_panel=_MODEL,
            help="Spread the layers over all GPUs, and what does not fit over memory and disk.",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1024,
            rich_help_panel=_MODEL,
            show_default="the cores at hand",
            help="Processor threads. Digits can differ in the last places between counts.",
        ),
    ] = None
    kernel: Annotated[
        str,
        typer.Option(
            metavar="auto|torch|compiled",
            callback=one_of("--kernel", "auto", "torch", "compiled"),
            rich_help_panel=_MODEL,
            help="How attention is computed; auto is compiled (for this machine, at first use; on a GPU by Triton) "
            "where it can be, else torch.",
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", rich_help_panel=_MODEL, help="Run code that the model brings along."),
    ] = False

    def set_processor(self) -> Kernel:
        """Compute on that many threads (None: all cores); gives the kernel of that name."""
        import torch

        from streamh2o.kernels.select import select
        from streamh2o.machine import physical_cores
        from streamh2o.models.device import choose_device
        from streamh2o.models.load import tell

        torch.set_num_threads(self.threads or physical_cores())
        return select(self.kernel, choose_device(self.device), tell)

    def load(self) -> Loaded:
        """The model, once threads and kernel are set."""
        from streamh2o.models.load import load_model
        from streamh2o.spinning import watch_for_neighbours

        self.set_processor()
        watch_for_neighbours()
        return load_model(
            self.model,
            self.dtype,
            self.device,
            self.trust_remote_code,
            device_map=self.device_map,
            weights=self.weights,
            kernel=self.kernel,
        )


@dataclass(frozen=True)
class CheckpointOptions:
    """Where, how often and whether anew a run is saved."""

    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=folder("--checkpoint"),
            rich_help_panel=_CHECKPOINT,
            help="Save the run in this folder, to go on after whatever happens.",
        ),
    ] = None
    checkpoint_every: Annotated[
        str,
        typer.Option(metavar="60s|N", rich_help_panel=_CHECKPOINT, help="How often: a time (s, m, h), or N tokens."),
    ] = "60s"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=_CHECKPOINT,
            help="Go on from DIR, with the same digits; stdin has to be piped in again. Start anew if it is empty.",
        ),
    ] = False

    def open(self, tell: Callable[[str], None]) -> Keeper | None:
        """The keeper of a run, None where it is not saved. Raises UsageError for --resume without a folder."""
        if self.checkpoint is None:
            if self.resume:
                raise UsageError("--resume goes on from a folder; name it with --checkpoint DIR.")
            return None
        from streamh2o.runs.saving.keeper import Keeper

        return Keeper(self.checkpoint, self.checkpoint_every, self.resume, tell)


def check_checkpoint(
    machine: ModelOptions,
    keeper: Keeper,
    sources: Sequence[Source],
    options: dict[str, Any],
    outputs: dict[str, Path | None],
) -> ModelOptions:
    """See, before the model is loaded, whether the checkpoint is of this run; sets threads and kernel.

    options: by name, all but the machine's. outputs: those that grow. Returns the machine with what `auto` stands for.
    """
    import torch

    from streamh2o.models.device import choose_device, choose_dtype
    from streamh2o.models.find import model_folder
    from streamh2o.models.load import fingerprint, quiet_transformers, tell
    from streamh2o.runs.saving.keeper import describe

    if machine.device_map is not None:
        raise UsageError("--checkpoint saves what is on one device; leave it or --device-map out.")
    dtype, device, threads, kernel = keeper.place(machine.dtype, machine.device, machine.threads, machine.kernel)
    machine = replace(machine, dtype=dtype, device=device, threads=threads, kernel=kernel)
    computes = machine.set_processor()
    place = choose_device(device)
    number = str(choose_dtype(dtype, place, machine.weights)).removeprefix("torch.")
    with quiet_transformers():
        folder = model_folder(machine.model, trust_remote_code=machine.trust_remote_code, tell=tell)
    where: dict[str, Any] = {"dtype": number, "device": str(place), "weights": machine.weights}
    where |= {"kernel": computes.name, "threads": torch.get_num_threads()}
    keeper.check(describe(sources, {**options, **where}, (machine.model, fingerprint(folder))), outputs)
    return replace(machine, dtype=number, kernel=computes.name)
