"""How a command gives its result: files first, then stdout, and at last what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.outputs import is_stdout, write_whole


def give_results(
    json: Path | None,
    lines: str,
    show: Callable[[], None],
    files: Iterable[Callable[[], None]] = (),
    failure: UserError | None = None,
) -> None:
    """Write `lines` to the file of `--json` and call `files`, each of which writes one; then print.

    lines: the result as JSON; it takes the place of what `show` prints if `json` is `-`. failure: what ended the run
    early. A file that cannot be written keeps no other one, nor the result, from appearing. Raises `failure`, or
    UserError that names every file that failed.
    """
    writes = [*files]
    if json is not None and not is_stdout(json):
        writes.insert(0, partial(write_whole, json, lines.encode()))
    failures: list[Exception] = [] if failure is None else [failure]
    for write in writes:  # before stdout, since whoever reads that may be gone
        try:
            write()
        except Exception as error:
            failures.append(error)
    if is_stdout(json):
        print(lines, end="", flush=True)
    else:
        show()
    if len(failures) == 1 and isinstance(failures[0], UserError):
        raise failures[0]
    if failures:
        kind = UsageError if isinstance(failure, UsageError) else UserError
        raise kind(" ".join(_sentence(error) for error in failures)) from failures[0]


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text.rstrip('.')}."
