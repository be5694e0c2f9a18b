"""`streamh2o plot`: pictures from logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamh2o.cli.manual import ManualCommand, make_app

app = make_app()


@app.command(cls=ManualCommand)
def plot(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG", help="Logs that --log wrote.", show_default=False)],
    plot: Annotated[
        Path, typer.Option("--plot", "-o", metavar="FILE", help="The picture to write: .png, .svg or .pdf.")
    ] = Path("perplexity.png"),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="What stands above it.", show_default=False)] = None,
) -> None:
    """Draw running and windowed perplexity over tokens from one or several logs.

    The bold line is the perplexity of all tokens so far, the thin one that of the newest. A log of several inputs gives
    a pair of lines for each of them. Logs of runs that are still going on can be drawn too.

    \b
    Examples:
      streamh2o ppl book.txt --log h2o.jsonl
      streamh2o ppl book.txt --policy streamingllm --log sllm.jsonl
      streamh2o plot h2o.jsonl sllm.jsonl --plot both.png
    """
    from streamh2o.report.perplexity_plot import check_format, plot_curves
    from streamh2o.runs.curve import read_log
    from streamh2o.runs.outputs import check_outputs
    from streamh2o.terminal_safe import visible

    check_format(plot)
    check_outputs({"--plot": plot}, logs)
    plot_curves([curve for log in logs for curve in read_log(log)], plot, title)
    print(visible(str(plot)))
