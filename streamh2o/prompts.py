"""How a text and a question are put to a model: as a chat where it knows one, else as question and answer."""

from __future__ import annotations

from typing import Any

from streamh2o.errors import UserError

_HOLE = "\ufdd0hole\ufdd0"  # noncharacters, which no template holds
_TASK = "Answer the question with a few words from the text."


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text` alone; names of special tokens in it are plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


class Prompter:
    """Prompts as ids for one model.

    `stem` and `question` belong together: after a text, they ask; the likelihood of the question's ids after the stem
    tells whether the text is about it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
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
        question = question.strip()
        if self._around is None:
            lead = [self._tokenizer.bos_token_id] if self._begins_with_bos() else []
            body = f"{text}\n\nQuestion: {question}\nAnswer:" if text else f"Question: {question}\nAnswer:"
            return lead + plain_ids(self._tokenizer, body)
        before, after = self._around
        body = f"Text: {text}\n\n{_TASK}\nQuestion: {question}" if text else f"{_TASK}\nQuestion: {question}"
        return before + plain_ids(self._tokenizer, body) + after

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._around is not None

    def answer(self, text: str) -> list[int]:
        """Ids of an answer as it would follow `ask`."""
        return plain_ids(self._tokenizer, text if self.chat else " " + text)

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
        """Ids before and after what the user says; the template's own special tokens are special there."""
        try:
            message = [{"role": "user", "content": _HOLE}]
            rendered = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its own
            reason = " ".join(str(error).split())
            raise UserError(f"The model's chat template can't be used ({reason}); use a model without one.") from None
        before, hole, after = rendered.partition(_HOLE)
        if not hole:
            raise UserError("The model's chat template leaves out what the user says; use a model without one.")
        ids = [list(self._tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after)]
        return ids[0], ids[1]
