"""A talk with a model: turns as ids, by the model's own chat template."""

from __future__ import annotations

from typing import Any

from streamh2o.errors import UserError
from streamh2o.models.prompts import plain_ids

_HOLES = [f"\ufdd0hole{number}\ufdd0" for number in range(3)]  # noncharacters, which no template holds


class Talk:
    """The ids of each turn of a talk. What people say is plain text: names of special tokens in it are not special.

    pinned: the ids of the beginning, up to where the user's first words stand, with the system prompt in them.
    ends: ids that end an answer. Raises UserError where the model has no chat template, or one that can't be used.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("The model has no chat template; leave --chat out, or use a model made for chats.")
        self._tokenizer = tokenizer
        rendered = self._render(system)
        if system is not None:
            start, found, rendered = rendered.partition(_HOLES[2])
            if not found:
                raise UserError("The model's chat template has no place for a system prompt; leave --system out.")
            self.pinned = self._special(start) + plain_ids(tokenizer, system)
        else:
            self.pinned = []
        lead, _, rest = rendered.partition(_HOLES[0])
        after, found, rest = rest.partition(_HOLES[1])
        between, found_again, _ = rest.partition(_HOLES[0])
        if not found or not found_again:
            raise UserError(
                "The model's chat template leaves out what is said; use a model without one, and no --chat."
            )
        self.pinned += self._special(lead)
        self._after, self._between = self._special(after), self._special(between)
        self._turns = 0

    def _render(self, system: str | None) -> str:
        talk = [{"role": "system", "content": _HOLES[2]}] if system is not None else []
        talk += [{"role": role, "content": hole} for role, hole in (("user", _HOLES[0]), ("assistant", _HOLES[1]))]
        talk += [{"role": "user", "content": _HOLES[0]}]
        try:
            text: str = self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its own
            reason = " ".join(str(error).split())
            raise UserError(f"The model's chat template can't be used ({reason}); leave --chat out.") from None
        return text

    def _special(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def turn(self, words: str) -> list[int]:
        """What to read before the next answer: the end of the last one, the user's `words`, and what opens the answer.

        The token that ended the last answer is part of it, and must not have been read.
        """
        before = self._between if self._turns else self.pinned
        self._turns += 1
        return before + plain_ids(self._tokenizer, words) + self._after
