"""Tokens of a book on one line, safe to show: the words around them plain, of a held token every character visible."""

from __future__ import annotations

import re

from streamh2o.terminal_safe import visible


def token_line(text: str) -> str:
    """A held token, whose line ends matter: ↵ for a line feed, ← for a carriage return."""
    return visible(text.replace("\r", "←").replace("\n", "↵"))


def context_line(text: str) -> str:
    """What stands beside it: every stretch of white space, line ends included, as one space."""
    return visible(re.sub(r"\s+", " ", text))
