"""`streamh2o doctor`: whether this machine is fit, one line a check."""

from __future__ import annotations

from typing import Annotated

import typer

from streamh2o.cli.manual import ManualCommand, make_app
from streamh2o.cli.model_and_checkpoint import ModelOptions
from streamh2o.cli.option_groups import Without, expand_groups
from streamh2o.errors import DONE, FAILED

app = make_app()


@app.command(cls=ManualCommand)
@expand_groups
def doctor(
    machine: Annotated[ModelOptions, Without("device_map", "trust_remote_code")],
) -> None:
    """Check this machine in seconds: versions, device, number format, memory, models, and whether the losses are right.

    A short text is read token by token, in chunks, and by transformers alone, on the device and in the number format
    that the other commands would use; the losses have to agree. Exits with 1 if anything is wrong.

    \b
    Examples:
      streamh2o doctor
      streamh2o doctor --model ./my-model --dtype float16 --device cuda
    """
    import torch

    from streamh2o.machine import physical_cores
    from streamh2o.runs.bench.doctor import examine
    from streamh2o.terminal_safe import visible

    torch.set_num_threads(machine.threads or physical_cores())
    wrong = 0
    for finding in examine(machine.model, machine.dtype, machine.device, machine.kernel, machine.weights):
        wrong += not finding.good
        print(f"{'ok   ' if finding.good else 'WRONG'} {finding.what + ':':13} {visible(finding.line)}", flush=True)
    print(f"{wrong} of these {'is' if wrong == 1 else 'are'} wrong." if wrong else "All is well.")
    raise typer.Exit(FAILED if wrong else DONE)
