"""Answers to questions about a text of any length: stream it once, then read again where the questions point."""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamh2o.errors import UsageError, UserError
from streamh2o.interrupt import Interrupt
from streamh2o.policies import make_policy
from streamh2o.progress import Observer
from streamh2o.prompts import Prompter
from streamh2o.reading import Reading, read
from streamh2o.retrieve import Part, Retriever, likelihoods
from streamh2o.run import PerplexityRun, RunOptions
from streamh2o.sentences import sentences, squeezed, whole_characters
from streamh2o.spool import Rereadable

if TYPE_CHECKING:
    from streamh2o.models import Loaded
    from streamh2o.text import Source

SINKS = 4
PARTS = 3  # read again per question, at most
WORTH = 0.5  # of the best part's gain, which another must have to be read again too
EVIDENCE = 3  # passages shown per question
MARGIN = 600  # bytes before and after a part, so that a sentence across its border is whole
ANSWER_ROOM = 64  # positions left for an answer and the words around the question
WEIGHTS = (-3.0, 1.0, 0.5, 8.0)  # of one, of the log-probability, of the margin, of what is explained: `confidence`
FOUND = 0.5  # confidence from which a question counts as answered


@dataclass(frozen=True)
class Evidence:
    """A sentence of the input: bytes `start` to `end` (its end not included), the line it begins on, its text.

    score: by how many nats the question is likelier after it than without any text.
    """

    start: int
    end: int
    line: int
    quote: str
    score: float


@dataclass(frozen=True)
class Answer:
    """confidence: 0 to 1; found: whether that is enough to believe that the text answers the question."""

    question: str
    answer: str
    confidence: float
    found: bool
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class _Sentence:
    start: int
    end: int
    text: bytes
    score: float  # nats
    explained: float  # the share of the question's loss without any text that this is


def answer_questions(
    loaded: Loaded,
    source: Source,
    questions: Sequence[str],
    *,
    cache: int = 1024,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    observers: Sequence[Observer] = (),
    interrupt: Interrupt | None = None,
    streamed: Callable[[], None] = lambda: None,
) -> tuple[list[Answer], bool]:
    """Answer `questions` about `source` in one pass over it, and a short second look per question.

    cache: the most tokens that attention ever spans, while streaming (without the chunk at hand) and when passages are
    read again. observers: called after every chunk; streamed: once the text has passed. interrupt: stops the
    streaming, the answers then being those of the text so far, or ends the answering after the question at hand.
    Returns the answers, and whether everything was read and answered. Raises UserError where the input can't be read or
    is empty, UsageError where the questions or sizes do not fit.
    """
    if not questions:
        raise UsageError("There is no question; ask with -q or --questions.")
    window = min(cache, SINKS + options.chunk + options.chunk // 2)
    if cache < 2 * ANSWER_ROOM:
        raise UsageError(f"--cache {cache} is too small to read a passage in; it must be at least {2 * ANSWER_ROOM}.")
    if cache > loaded.trained_positions:
        raise UsageError(
            f"--cache {cache} exceeds the {loaded.trained_positions} positions this model was trained on; lower it."
        )
    retriever = Retriever(loaded, questions, options.chunk)
    policy = make_policy("streamingllm", cache=window, sinks=SINKS)
    with Rereadable(source) as text:
        token = byte = 0
        with PerplexityRun(loaded, text.source, policy, options) as run:
            for progress in run.chunks(interrupt):
                retriever.look(run.stream, Part(byte, progress.byte))
                token, byte = progress.token, progress.byte
                for observer in observers:
                    observer(progress)
            complete = run.complete
        stopped = interrupt is not None and interrupt.requested
        if token == 0:
            if stopped:
                raise KeyboardInterrupt
            raise UserError(f"{source.name}: nothing was read, so there is nothing to answer from.")
        streamed()
        answers: list[Answer] = []
        for number, question in enumerate(questions):
            if interrupt is not None and interrupt.requested and not stopped:
                return answers, False
            answers.append(_answer(loaded, retriever, text, number, question, cache, byte))
        return answers, complete


def _answer(
    loaded: Loaded, retriever: Retriever, text: Rereadable, number: int, question: str, cache: int, end: int
) -> Answer:
    best_parts = retriever.best(number, PARTS)
    parts = [part for part, gained in best_parts if gained >= WORTH * best_parts[0][1]] or [best_parts[0][0]]
    ranked = _rank_sentences(loaded, retriever, text, number, parts, end)
    if not ranked:  # nothing but white space
        return Answer(question, "", 0.0, False, ())
    prompter = retriever.prompter
    best, shown = _read_best(loaded, prompter, text, question, ranked, cache, end)
    lines = text.lines([sentence.start for sentence in shown])
    evidence = tuple(
        Evidence(each.start, each.end, lines[each.start], each.text.decode("utf-8", "replace"), each.score)
        for each in shown
    )
    sure = confidence(best, shown[0].explained)
    return Answer(question, best.answer, sure, sure >= FOUND, evidence)


def _rank_sentences(
    loaded: Loaded, retriever: Retriever, text: Rereadable, number: int, parts: Sequence[Part], end: int
) -> list[_Sentence]:
    """The sentences of `parts`, the one after which the question is likeliest first."""
    found: dict[tuple[int, int], bytes] = {}
    for part in parts:
        for start, data in _sentences_of(text, part.start, part.end, end):
            found[start, start + len(data)] = data
    ids, prompter = retriever.ids[number], retriever.prompter
    spans = sorted(found)
    contexts = [prompter.text(squeezed(found[span])) for span in spans]
    alone, *after = likelihoods(loaded, [(context + retriever.stem, ids) for context in ([], *contexts)])
    usual = float(alone.sum())
    ranked = [
        _Sentence(*span, found[span], usual - float(nll.sum()), 1 - float(nll.sum()) / usual)
        for span, nll in zip(spans, after, strict=True)
    ]
    return sorted(ranked, key=lambda sentence: -sentence.score)


def _sentences_of(text: Rereadable, start: int, stop: int, end: int) -> list[tuple[int, bytes]]:
    """Sentences that lie, at least in part, in bytes `start` to `stop`: (offset, bytes)."""
    first = max(0, start - MARGIN)
    data = text.read(first, min(end, stop + MARGIN))
    left, right = whole_characters(data)
    if first == 0 and data.startswith(BOM_UTF8):
        left = len(BOM_UTF8)
    data, first = data[left:right], first + left
    return [(first + a, data[a:b]) for a, b in sentences(data) if first + b > start and first + a < stop]


def _passage(text: Rereadable, sentence: _Sentence, end: int) -> tuple[int, int]:
    """The sentence with the one before and the one after it, as bytes of the input."""
    around = _sentences_of(text, sentence.start - MARGIN, sentence.end + MARGIN, end)
    before = [start for start, data in around if start + len(data) <= sentence.start]
    after = [start + len(data) for start, data in around if start >= sentence.end]
    return (before or [sentence.start])[-1], (after or [sentence.end])[0]


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in source order, with spans that touch or overlap made one."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def _text_of(
    prompter: Prompter, text: Rereadable, ranked: Sequence[_Sentence], question: str, cache: int, end: int
) -> str:
    """The best passages that together fit into the cache, in source order, as one text."""
    room = cache - ANSWER_ROOM - len(prompter.ask("", question))
    chosen: list[tuple[int, int]] = []
    result = ""
    for sentence in ranked:
        for span in (_passage(text, sentence, end), (sentence.start, sentence.end)):
            wider = merged([*chosen, span])
            joined = " ... ".join(squeezed(text.read(*each)) for each in wider)
            if len(prompter.text(joined)) <= room:
                chosen, result = wider, joined
                break
    return result


def _read_best(
    loaded: Loaded,
    prompter: Prompter,
    text: Rereadable,
    question: str,
    ranked: Sequence[_Sentence],
    cache: int,
    end: int,
) -> tuple[Reading, list[_Sentence]]:
    """The surest answer from the best passages together and from the best one alone, and the sentences to show for it.

    Together they answer what one sentence does not; alone the best one does not mislead a small model by the others.
    """
    top = ranked[:EVIDENCE]
    readings = [
        read(loaded, prompter, together, question)
        for together in dict.fromkeys(
            _text_of(prompter, text, few, question, cache, end) for few in (top[:1], top) if few
        )
    ]
    best = max(readings, key=lambda reading: reading.logprob + reading.margin)
    return best, _with_answer_first(top, best.answer)


def _with_answer_first(top: Sequence[_Sentence], answer: str) -> list[_Sentence]:
    """A sentence that holds the answer word for word is better evidence than one that does not."""
    wanted = answer.casefold().rstrip(".")
    return sorted(top, key=lambda each: wanted not in squeezed(each.text).casefold())


def confidence(reading: Reading, explained: float) -> float:
    """How likely the answer is to be right, 0 to 1.

    explained: the share of the question's loss without a text that the best passage takes away. It stays small where
    only the form of the question fits and its names do not. A logistic function of it, of the answer's mean
    log-probability, and of its margin over the same answer without the text; for the weights see docs/answers.md.
    """
    if not reading.answer:
        return 0.0
    value = WEIGHTS[0] + WEIGHTS[1] * reading.logprob + WEIGHTS[2] * reading.margin + WEIGHTS[3] * explained
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
