"""A text of any length, read and then continued. New text goes to a callback, a piece after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from streamh2o.errors import UserError
from streamh2o.models.prompts import Prompter
from streamh2o.runs.generate.characters import Characters
from streamh2o.runs.generate.generation import Generation
from streamh2o.runs.generate.generator import Generator
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.runs.interrupt import Interrupt, Stopped
from streamh2o.runs.options import RunOptions, open_reader
from streamh2o.runs.saving.checks import naming_damage, require_count, require_reader

if TYPE_CHECKING:
    from torch import Tensor

    from streamh2o.models.loaded import Loaded
    from streamh2o.stream.stream_cache import StreamCache
    from streamh2o.text import Source

OnText = Callable[[str], None]


class Continuation:
    """A text between two blocks read or two tokens written, as `--checkpoint` saves it.

    before: the newest ids that `generator` has read. reader: state of the `TokenReader`, from the first block on. read:
    whether the text has been read. written: new tokens so far.
    """

    def __init__(self, generator: Generator, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.generator = generator
        self.characters = Characters(tokenizer, before)
        self.reader: dict[str, Any] | None = None
        self.read = False
        self.written = 0

    @property
    def tokens(self) -> int:
        return self.generator.read_tokens + self.generator.new_tokens

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, counts = self.generator.state()
        rest = {"reader": self.reader, "read": self.read, "written": self.written}
        return tensors, {**rest, "generator": counts, "characters": self.characters.state()}

    def load_state(self, tensors: dict[str, Tensor], counts: dict[str, Any]) -> None:
        """Raises UserError, LookupError, TypeError or ValueError where it is not what `state` gave."""
        require_count(counts["written"])
        if counts["reader"] is not None:
            require_reader(counts["reader"])
        self.reader, self.read, self.written = counts["reader"], bool(counts["read"]), counts["written"]
        self.characters.load_state(counts["characters"])
        self.generator.load_state(tensors, counts["generator"])


Keep = Callable[[Continuation, bool], None]


def continue_text(
    loaded: Loaded,
    cache: StreamCache,
    source: Source,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    max_new_tokens: int | None = 512,
    stop_at_end: bool = False,
    on_text: OnText = lambda _: None,
    interrupt: Interrupt | None = None,
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    keep: Keep = lambda *_: None,
) -> Generation:
    """Read all of `source` with `cache`, and write what may follow.

    options: how the text is read (its BOS, errors, line ends, most tokens). max_new_tokens: None for no end.
    stop_at_end: the model may end the text; else it may not choose a token that does. on_text: called with new text,
    whole characters only. interrupt: stops after the block or the token at hand. saved: of `Continuation.state`, to go
    on from. keep: called when that may be saved, with True when it stops. Raises UserError where the text can't be read
    or is empty.
    """
    ends = Prompter(loaded.tokenizer).ends()
    generator = Generator(loaded, cache, sampling, ends, endless=not stop_at_end)
    continuation = Continuation(generator, loaded.tokenizer)
    if saved is not None:
        with naming_damage("The checkpoint"):
            continuation.load_state(*saved)
    try:
        if not continuation.read:
            _read(continuation, loaded, source, options, interrupt, keep)
        stopped = write(continuation, max_new_tokens, on_text, interrupt, keep)
    except Stopped:
        stopped = "interrupted"
        keep(continuation, True)
    return Generation.of(loaded, generator, stopped)


def _read(
    continuation: Continuation,
    loaded: Loaded,
    source: Source,
    options: RunOptions,
    interrupt: Interrupt | None,
    keep: Keep,
) -> None:
    """Read the text, or what is left of it."""
    with open_reader(source, loaded.tokenizer, options, continuation.reader) as reader:
        while True:
            with interrupt.waiting() if interrupt else nullcontext():
                block = reader.read(continuation.generator.cache.chunk)
            if block is None:
                break
            ids = block.ids.tolist()
            continuation.generator.read(ids)
            continuation.characters = Characters(loaded.tokenizer, ids)
            continuation.reader = reader.state()
            keep(continuation, False)
    if not continuation.tokens:
        raise UserError(f"{source.name}: is empty, so there is nothing to continue; give it a word at least.")
    continuation.read = True


def write(
    continuation: Continuation,
    max_new_tokens: int | None,
    on_text: OnText,
    interrupt: Interrupt | None = None,
    keep: Keep = lambda *_: None,
) -> str:
    """New text up to `max_new_tokens`, the model's end or an interrupt; returns which, as `Generation.stopped` says it.

    The characters that an unfinished token leaves come after the last `keep`, so that a resumed text completes them.
    """
    characters, stopped = continuation.characters, "max-new-tokens"
    left = None if max_new_tokens is None else max_new_tokens - continuation.written
    for token in continuation.generator.tokens(left):
        continuation.written += 1
        on_text(characters.feed(token))
        interrupted = interrupt is not None and interrupt.requested
        keep(continuation, interrupted)
        if interrupted:
            stopped = "interrupted"
            break
    else:
        if max_new_tokens is None or continuation.written < max_new_tokens:
            stopped = "end"
    on_text(characters.flush())
    return stopped
