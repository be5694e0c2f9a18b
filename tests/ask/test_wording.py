"""Words of the questions in a text: rare ones say much, those of every sentence nothing."""

import math

import pytest

from streamh2o.ask.wording import Wording, vocabulary


def test_words_are_letters_and_digits_and_chinese_goes_sign_by_sign():
    assert vocabulary("The <REGISTER_CONTENT> of line 12-b?") == {"the", "register", "content", "of", "line", "12", "b"}
    assert vocabulary("谁建造了 Marlow?") == {"谁", "建", "造", "了", "marlow"}


def test_a_name_that_stands_once_says_more_than_what_every_sentence_says():
    wording = Wording(["Where is the line of Marlow?", "Who?"])
    parts = [b"The line is long, they said. The line is short, they said."] * 3 + [b"The line is that of Marlow. No."]
    found = [wording.look(part) for part in parts]
    assert found[3] == {"the", "line", "is", "of", "marlow"}
    assert wording.of_part(0, found[0]) == 0
    assert wording.of_part(0, found[3]) == pytest.approx(2 * math.log(4))
    assert wording.of_part(1, found[3]) == 0
    assert wording.of_sentence(0, "Marlow.") > wording.of_sentence(0, "The line is long.")


def test_what_is_covered_grows_with_the_words_that_stand_there_up_to_one():
    wording = Wording(["How tall is the Marlow mill?"])
    for part in (b"Nobody came that day at all. It rained.", b"The Marlow mill has a pass code, they said. It snowed."):
        wording.look(part)
    none, some, more = (
        wording.covered(0, text) for text in ("It rained.", "The Marlow mill.", "How tall the Marlow mill is")
    )
    assert none == 0 < some < more == 1


def test_an_empty_text_covers_nothing():
    wording = Wording(["Who?"])
    wording.look(b"")
    assert wording.covered(0, "Who?") == 0
