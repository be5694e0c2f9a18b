"""`python -m streamh2o` is `streamh2o`."""

from streamh2o.cli.start import run

run()
