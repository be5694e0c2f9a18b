"""One input through the loop that the commands use."""

from types import SimpleNamespace

from streamh2o.errors import UserError
from streamh2o.runs.in_turn import InTurn
from streamh2o.runs.options import RunOptions
from streamh2o.runs.perplexity_run import PerplexityRun
from streamh2o.runs.progress import Display
from streamh2o.runs.run_files import RunFiles
from streamh2o.runs.score_inputs import score_inputs


class RunFailed(UserError):
    """A run failed after some chunks; `result` holds what was finished."""

    def __init__(self, message, result):
        super().__init__(message)
        self.result = result


class Watch(Display):
    """Hands each chunk to the observers."""

    def __init__(self, observers):
        self.observers = list(observers)

    def __call__(self, progress):
        for observer in self.observers:
            observer(progress)


def run_perplexity(loaded, source, policy, options=RunOptions(), observers=(), interrupt=None, saved=None, keep=None):  # noqa: B008
    """The result of `source`. saved: to go on from. keep: called when the run's state may be saved."""
    keeper = keep and SimpleNamespace(results=[], state=saved, keep=keep, done=lambda *_, **__: None)
    runs = InTurn(
        [source], lambda one, state: PerplexityRun(loaded, one, policy, options, state or saved), keeper=keeper
    )
    with RunFiles([source]) as files:
        scored = score_inputs(runs, files, Watch(observers), interrupt)
    if scored.failure is not None and scored.results:
        raise RunFailed(str(scored.failure), scored.results[0])
    if scored.failure is not None:
        raise scored.failure
    return scored.results[0]
