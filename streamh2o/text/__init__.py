"""Bytes to token ids: the first part of the data path.

A byte goes through four modules. `sources` opens what the user named. `utf8` turns bytes into text with byte offsets.
`tokenize` turns text into ids, window by window. `reader` does all of it in a thread ahead of the model.
"""

from streamh2o.text.reader import Block, TokenReader
from streamh2o.text.sources import Source, open_inputs

__all__ = ["Block", "Source", "TokenReader", "open_inputs"]
