"""Text from outside, made safe to show: it may not drive the user's terminal."""

import unicodedata

# Format characters that emoji and several scripts need; they move nothing but the glyphs beside them.
_JOINERS = {"\u200c", "\u200d", "\ufe0e", "\ufe0f"}


def visible(text: str, keep_newlines: bool = False) -> str:
    r"""`text` with every character that a terminal could obey written as an escape: `\x1b`, `\u202e`.

    That is control characters, line and paragraph separators, marks that turn the direction of writing, and halves
    of surrogate pairs (from file names that are not UTF-8). keep_newlines: leave line ends in place.
    """
    return "".join(
        character if _harmless(character) or (keep_newlines and character == "\n") else _escape(character)
        for character in text
    )


def _harmless(character: str) -> bool:
    if " " <= character <= "~":
        return True
    return character in _JOINERS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
