"""Where the console script begins: Ctrl-C ends it quietly even while the command line is still being imported."""

import sys

from streamh2o.errors import INTERRUPTED


def run() -> None:
    try:
        from streamh2o.cli.main import run as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command()
