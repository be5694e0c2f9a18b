"""How a text and a question are put to a model: as a chat where it knows one, else as question and answer."""

from __future__ import annotations

from typing import Any

from streamh2o.errors import UserError

_HOLE = "\ufdd0hole\ufdd0"  # noncharacters, which no template holds
# Examples show a small model better than any instruction that a few words of the text are wanted.
_EXAMPLES = (
    (
        "The old mill at Harby stood empty. Its owner, Tom Reed, kept 31 sheep there.",
        "How many sheep did Tom Reed keep?",
        "31",
    ),
    (
        "They waited. Mrs. Lowe had married a baker from Kent in June. It rained.",
        "Whom did Mrs. Lowe marry?",
        "a baker from Kent",
    ),
)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text` alone; special tokens' names in it are plain text, and bytes that are not UTF-8 are U+FFFD."""
    return list(tokenizer(_as_utf_8(text), add_special_tokens=False, split_special_tokens=True).input_ids)


def _as_utf_8(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Prompter:
    """Prompts as ids for one model.

    pin: an instruction put before every text and question. `stem` and `question` belong together: after a text, they
    ask; the likelihood of the question's ids after the stem shows whether the text is about it.
    """

    def __init__(self, tokenizer: Any, pin: str = "") -> None:
        self._tokenizer = tokenizer
        self.pin = pin.strip()
        self.stem = plain_ids(tokenizer, "\n\nQuestion:")
        self._around = self._chat() if getattr(tokenizer, "chat_template", None) else None

    def question(self, question: str) -> list[int]:
        """Ids of a question after the stem."""
        return plain_ids(self._tokenizer, " " + question.strip())

    def text(self, text: str) -> list[int]:
        """Ids of a passage."""
        return plain_ids(self._tokenizer, text)

    def ask(self, text: str, question: str) -> list[int]:
        """What to continue with the answer to `question` about `text`; without `text`, the question alone."""
        if self._around is None:
            lead = [self._tokenizer.bos_token_id] if self._begins_with_bos() else []
            examples = "".join(f"{_base(*example[:2])} {example[2]}\n\n" for example in _EXAMPLES)
            return lead + plain_ids(self._tokenizer, examples + _base(self._pinned(text), question))
        before, after = self._around
        return before + plain_ids(self._tokenizer, _joined(self._pinned(text), question)) + after

    def _pinned(self, text: str) -> str:
        return _joined(self.pin, text) if self.pin else text

    def question_stops(self, question: str) -> list[int]:
        """For each of the ids of `question`, the characters of the question, stripped, up to its end."""
        return self._with_stops(" ", _as_utf_8(question.strip()))[1]

    def answer(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of an answer as it would follow `ask`, and for each the characters of `text` up to its end."""
        return self._with_stops("" if self._around else " ", text)

    def _with_stops(self, lead: str, text: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer(
            lead + text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        return list(encoded.input_ids), [max(0, end - len(lead)) for _, end in encoded.offset_mapping]

    def decode(self, ids: list[int]) -> str:
        """Text of an answer's ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def ends(self) -> set[int]:
        """Ids after which an answer is over."""
        ends = {self._tokenizer.eos_token_id}
        for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"):
            index = self._tokenizer.convert_tokens_to_ids(name)
            if index is not None and index != self._tokenizer.unk_token_id:
                ends.add(index)
        return {index for index in ends if index is not None}

    def _begins_with_bos(self) -> bool:
        bos = self._tokenizer.bos_token_id
        return bos is not None and self._tokenizer("a").input_ids[:1] == [bos]

    def _chat(self) -> tuple[list[int], list[int]]:
        """Ids before and after what the user says last; the template's own special tokens are special there."""
        said = [(_joined(text, question), answer) for text, question, answer in _EXAMPLES]
        messages = [
            {"role": role, "content": content}
            for pair in said
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        try:
            messages.append({"role": "user", "content": _HOLE})
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its own
            reason = " ".join(str(error).split())
            raise UserError(f"The model's chat template can't be used ({reason}); use a model without one.") from None
        before, hole, after = rendered.partition(_HOLE)
        if not hole:
            raise UserError("The model's chat template leaves out what the user says; use a model without one.")
        ids = [list(self._tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after)]
        return ids[0], ids[1]


def _joined(text: str, question: str) -> str:
    return "\n\n".join(part.strip() for part in (text, question) if part.strip())


def _base(text: str, question: str) -> str:
    lead = f"Text: {text}\n" if text else ""
    return f"{lead}Question: {question.strip()}\nAnswer:"
