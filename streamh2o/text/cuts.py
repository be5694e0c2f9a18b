"""Where a text may be cut, and where its words begin."""

import re
import unicodedata

import numpy as np

_SPACES = np.array([chr(code).isspace() for code in range(0x3002)])
# Characters that join the next one into a grapheme (Unicode 16, Grapheme_Cluster_Break=Prepend).
_PREPENDED = re.compile(
    "[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3\U000113d1"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46\U00011f02]"
)
_JOINING = {"Mn", "Mc", "Me", "Cf", "Cn"}


def separable(text: str, index: int) -> bool:
    """Whether normalising text[:index] and text[index:] apart surely gives the normalised whole.

    Nothing at the cut may compose, reorder or make one grapheme (Unicode Standard Annexes 15 and 29).
    """
    before, after = text[index - 1], text[index]
    if after.isascii():
        return not (before == "\r" and after == "\n") and not _PREPENDED.match(before)
    first = unicodedata.normalize("NFKD", after)[0]
    joins = "\u1160" <= first <= "\u11ff" or unicodedata.combining(first) != 0
    if joins or unicodedata.category(after)[0] not in "LNPZ" or unicodedata.category(first)[0] == "M":
        return False
    return unicodedata.category(before) not in _JOINING and not _PREPENDED.match(before)


def word_begins(text: str, after_space: bool) -> np.ndarray:
    """Index of every character that begins a word: not white space, but preceded by it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    spaces = _SPACES[np.minimum(codes, len(_SPACES) - 1)]
    return np.flatnonzero(~spaces & np.concatenate(([after_space], spaces[:-1])))
