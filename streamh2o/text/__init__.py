"""Bytes to token ids: the first stretch of the data path, in the order in which a byte travels it.

`sources` opens what the user named, `decode` turns bytes into text that knows its byte offsets, `tokenize`
turns text into ids window by window, and `reader` does all of it in a thread ahead of the model.
"""

from streamh2o.text.reader import Block, TokenReader
from streamh2o.text.sources import Source, open_inputs

__all__ = ["Block", "Source", "TokenReader", "open_inputs"]
