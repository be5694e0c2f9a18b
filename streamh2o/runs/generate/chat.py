"""A chat: turns as ids, by the model's own chat template, and the answers to them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UserError
from streamh2o.models.prompts import Prompter, plain_ids
from streamh2o.runs.generate.continuation import Continuation, OnText, write
from streamh2o.runs.generate.generation import Generation
from streamh2o.runs.generate.generator import Generator
from streamh2o.runs.interrupt import Interrupt, Stopped

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded
    from streamh2o.runs.generate.sampling import Sampling
    from streamh2o.stream.stream_cache import StreamCache

_HOLES = [f"\ufdd0hole{number}\ufdd0" for number in range(3)]  # noncharacters, which no template holds


class Chat:
    """The ids of each turn of a chat. What people say is plain text: names of special tokens in it are not special.

    pinned: the ids of the beginning, up to where the user's first words stand, with the system prompt in them.
    Raises UserError where the model has no chat template, or one that can't be used.
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
        messages = [{"role": "system", "content": _HOLES[2]}] if system is not None else []
        messages += [{"role": role, "content": hole} for role, hole in (("user", _HOLES[0]), ("assistant", _HOLES[1]))]
        messages += [{"role": "user", "content": _HOLES[0]}]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
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


def answer_turns(
    loaded: Loaded,
    cache: StreamCache,
    chat: Chat,
    turns: Iterable[str],
    sampling: Sampling,
    *,
    max_new_tokens: int | None = 512,
    on_text: OnText = lambda _: None,
    interrupt: Interrupt | None = None,
) -> Generation:
    """Answer each of `turns`, which may be typed meanwhile, until there are no more or `interrupt` stops it.

    max_new_tokens: of each answer; None for no end but the model's. on_text: called with each answer as it comes, and
    with an empty line after it.
    """
    generator = Generator(loaded, cache, sampling, Prompter(loaded.tokenizer).ends())
    words, stopped = iter(turns), "end"
    try:
        while True:
            with interrupt.waiting() if interrupt else nullcontext():
                said = next(words, None)
            if said is None:
                break
            ids = chat.turn(said)
            generator.read(ids)
            ending = write(Continuation(generator, loaded.tokenizer, ids), max_new_tokens, on_text, interrupt)
            on_text("\n\n")
            if ending == "interrupted":
                stopped = ending
                break
    except Stopped:
        stopped = "interrupted"
    return Generation.of(loaded, generator, stopped)
