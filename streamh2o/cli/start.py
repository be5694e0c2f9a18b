"""Where the console script begins: Ctrl-C ends it quietly even while the command line is still being imported."""

import sys


def run() -> None:
    try:
        from streamh2o.cli.main import run as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()
