"""Tokens become whole characters, and none is lost."""

from hypothesis import given
from hypothesis import strategies as st

from streamh2o.runs.generate.characters import Characters
from tests.chat_tokenizer import byte_level


@given(st.text(max_size=40))
def test_characters_come_whole_and_nothing_is_lost(text):
    tokenizer = byte_level()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    characters = Characters(tokenizer)
    parts = [characters.feed(token) for token in ids]
    assert "".join(parts) + characters.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
    tokenizer = byte_level()
    half = tokenizer("\U0001f3fd", add_special_tokens=False).input_ids[:1]
    assert tokenizer.decode(half) == "\ufffd"
    characters = Characters(tokenizer)
    assert any(characters.feed(half[0]) for _ in range(20))
