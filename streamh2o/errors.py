"""Errors a user can cause: one sentence each, shown without a traceback."""


class UserError(Exception):
    """Something outside the program is wrong (input, model, machine); the command exits with code 1."""

    exit_code = 1


class UsageError(UserError):
    """The options given cannot work together; the command exits with code 2."""

    exit_code = 2
