"""Errors a user can cause: one sentence each, shown without a traceback. And the exit codes of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130  # exit codes of the command line

# What torch's allocator for the CPU says, as a plain RuntimeError: it has no type of its own. The second is Windows'.
_CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


class UserError(Exception):
    """Something outside the program is wrong (input, model, machine); the command exits with code 1."""

    exit_code = FAILED


class UsageError(UserError):
    """The options given cannot work together; the command exits with code 2."""

    exit_code = BAD_USAGE


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # where it was never imported, no error is of one of its types
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(sentence in str(error) for sentence in _CPU_ALLOCATOR)


@contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Raise UserError, which begins with `what`, where the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"{what}; free some, or use a smaller --chunk, --cache or model.") from error
