"""`streamh2o.answer`: what the command `answer` does, as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streamh2o.api.inputs import Input, to_source
from streamh2o.api.model import to_loaded, torch_threads
from streamh2o.errors import UsageError

if TYPE_CHECKING:
    from streamh2o.api.model import Model
    from streamh2o.ask.answer import Answers


def answer(
    input: Input | None = None,
    questions: str | Sequence[str] = (),
    *,
    text: str | None = None,
    pin: str = "",
    every: int | None = None,
    on_answers: Callable[[Answers], None] | None = None,
    model: Model = "smollm2-135m",
    cache: int = 1024,
    chunk: int = 256,
    max_tokens: int | None = None,
    bos: str = "auto",
    newline: str = "keep",
    errors: str = "strict",
    allow_special: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    kernel: str = "auto",
    progress: bool = False,
) -> Answers:
    """Answer questions about a text of any length, and say where in the text each answer stands.

    The text streams through the model once, whatever the number of questions; then the sentences that each question
    points to are read again.

    input, text: one of them. A path, an open file or an iterable of pieces of text; or the text itself.
    questions: one or several. pin: an instruction that is never evicted, and comes before what is read again.
    every, on_answers: call `on_answers` with the best answers so far after each so many tokens.
    model: a name as on the command line, what `load_model` returns, or a pair (model, tokenizer) of transformers.
    cache: the most tokens that the model looks back at, at any time. chunk: tokens of one forward pass.
    max_tokens: read at most so many tokens. bos: `auto`, `yes` or `no`. newline: `keep` or `lf`. errors: `strict` or
    `replace` bytes that are not UTF-8. allow_special: names of special tokens in the text become these tokens.
    dtype, device: for a model given by its name. threads: None leaves those of torch alone. kernel: how attention is
    computed, `auto`, `compiled` or `torch`. progress: show it on stderr.

    Returns `Answers`, one `Answer` a question. Offsets of evidence are bytes of the input, its end not included.
    Raises UsageError for options that do not fit, UserError for a text that cannot be read or is empty.

        found = streamh2o.answer("book.txt", ["Who painted the ceiling of the chapel?"])
        for each in found:
            print(each.answer, each.confidence, each.evidence[0].quote)
    """
    asked = [questions] if isinstance(questions, str) else list(questions)
    if not asked or not all(isinstance(question, str) and question.strip() for question in asked):
        raise UsageError("answer takes questions, each a text with at least a word.")
    if (every is None) != (on_answers is None):
        raise UsageError("every and on_answers go together: after how many tokens, and what to call.")
    source = to_source(input, text, "answer")

    from streamh2o.ask.answer_run import answer_questions
    from streamh2o.report.live import make_display
    from streamh2o.runs.options import RunOptions

    options = RunOptions(
        chunk=chunk, max_tokens=max_tokens, bos=bos, newline=newline, errors=errors, allow_special=allow_special
    )
    with torch_threads(threads):
        loaded = to_loaded(model, dtype=dtype, device=device, kernel=kernel)
        with make_display(quiet=not progress) as display:
            display.begin(source.name)
            return answer_questions(
                loaded,
                source,
                asked,
                cache=cache,
                options=options,
                pin=pin,
                every=every,
                so_far=on_answers or (lambda _: None),
                observers=[display],
                streamed=display.end,
            )
