"""`streamh2o doctor`: whether this machine is fit, one line a check."""

from __future__ import annotations

import typer

from streamh2o.cli import options as opt
from streamh2o.cli.manual import ManualCommand, make_app

app = make_app()


@app.command(cls=ManualCommand)
def doctor(
    model: opt.Model = "smollm2-135m",
    dtype: opt.Dtype = "auto",
    weights: opt.Weights = "plain",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    kernel: opt.Kernel = "auto",
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

    torch.set_num_threads(threads or physical_cores())
    wrong = 0
    for finding in examine(model, dtype, device, kernel, weights):
        wrong += not finding.good
        print(f"{'ok   ' if finding.good else 'WRONG'} {finding.what + ':':13} {visible(finding.line)}", flush=True)
    print(f"{wrong} of these {'is' if wrong == 1 else 'are'} wrong." if wrong else "All is well.")
    raise typer.Exit(1 if wrong else 0)
