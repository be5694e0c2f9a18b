"""`--transcript`: what was read and written, as plain text, on disk as soon as it is complete."""

from __future__ import annotations

from streamh2o.runs.growing_file import GrowingFile


class Transcript(GrowingFile):
    """A UTF-8 text file that grows. Raises UserError where it cannot be written."""

    def __enter__(self) -> Transcript:
        return self

    def write(self, text: str) -> None:
        self._append(text.encode("utf-8", "replace"))
