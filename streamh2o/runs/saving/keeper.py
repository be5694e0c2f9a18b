"""What `--checkpoint` saves of a run, how often, and whether a later command may go on from it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamh2o.errors import UsageError, UserError
from streamh2o.runs.curve import Curve
from streamh2o.runs.growing_file import GrowingFile
from streamh2o.runs.saving.folder import CheckpointFolder

if TYPE_CHECKING:
    import torch

    from streamh2o.text import Source

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FIRST = ("policy", "cache", "sinks")  # from which other knobs follow, so they are named if they differ
_LONGEST_SHOWN = 80  # characters of an option's value
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """How often to save: after so many seconds, by a clock that never goes backwards, or after so many tokens."""

    seconds: float | None = 60.0
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Pace:
        """`60s`, `5m`, `1h`, or a number of tokens. Raises UsageError for anything else."""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])|(\d{1,15})", text.strip())
        if match is None or not float(match.group(1) or match.group(3)):
            raise UsageError(f"--checkpoint-every {text}: write a time such as 60s or 5m, or a number of tokens.")
        if match.group(3):
            return cls(None, int(match.group(3)))
        return cls(float(match.group(1)) * _UNITS[match.group(2)])


class Saveable(Protocol):
    """What can be saved between two steps: `tokens` so far, and a state of tensors and of counts that survive JSON."""

    @property
    def tokens(self) -> int: ...

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...


def describe(sources: Sequence[Source], options: dict[str, Any], model: tuple[str, str]) -> dict[str, Any]:
    """All that the result depends on, JSON-able. options: by their names. model: its name and fingerprint."""
    from streamh2o.versions import versions

    return {
        "inputs": [[source.name, source.size] for source in sources],
        "model": list(model),
        "options": options,
        "versions": versions(),
    }


def check_same(saved: dict[str, Any], now: dict[str, Any], tell: Tell) -> None:
    """Refuse, saying which, where an input, the model or an option is not that of the checkpoint.

    saved, now: of `describe`. `tell` hears of libraries of another version, whose last digits may differ.
    Raises UserError, for options UsageError.
    """
    before, after = saved["inputs"], now["inputs"]
    if [name for name, _ in before] != [name for name, _ in after]:
        then = ", ".join(name for name, _ in before)
        raise UserError(f"The checkpoint is of other inputs ({then}); name the same ones in the same order.")
    for (name, size), (_, size_now) in zip(before, after, strict=True):
        if size != size_now:
            raise UserError(
                f"{name}: has {size_now} bytes, and had {size} at the checkpoint; resume with the same input."
            )
    if saved["model"][1] != now["model"][1]:
        raise UserError(
            f"The model {now['model'][0]} is not the one of the checkpoint ({saved['model'][0]}, fingerprint "
            f"{saved['model'][1]}, now {now['model'][1]}); resume with the same model."
        )
    rest = sorted((saved["options"].keys() | now["options"].keys()) - set(_FIRST))
    for name in (*_FIRST, *rest):
        then, given = (each["options"].get(name) for each in (saved, now))
        if then != given:
            flag = "--" + name.replace("_", "-")
            was, new = ("not given" if value is None else str(value)[:_LONGEST_SHOWN] for value in (then, given))
            raise UsageError(f"{flag} was {was} at the checkpoint and is {new} now; resume with the same options.")
    for name, version in saved["versions"].items():
        here = now["versions"].get(name)
        if version == here or name == "python":
            continue
        if name == "streamh2o":
            raise UserError(f"The checkpoint was made by streamh2o {version}, this is {here}; install that version.")
        tell(f"{name} was {version} at the checkpoint and is {here} now: the last digits of the losses may differ.")


@dataclass
class Outputs:
    """The files that grow with a run, by option, and its curves: what has to stand where it stood when it goes on."""

    files: dict[str, GrowingFile] = field(default_factory=dict)
    curves: list[Curve] = field(default_factory=list)
    plotted: bool = False

    def state(self) -> dict[str, Any]:
        marks: dict[str, Any] = {option: file.mark() for option, file in self.files.items()}
        return marks | ({"--plot": [asdict(curve) for curve in self.curves]} if self.plotted else {})


def check_outputs_same(saved: dict[str, Any], given: set[str]) -> None:
    """Raises UsageError where an output was named before and is not now, or the other way round: half would miss.

    saved: of `Outputs.state`. given: the options that name outputs now.
    """
    for option in sorted(saved.keys() ^ given):
        was, now = ("given", "not given") if option in saved else ("not given", "given")
        raise UsageError(f"{option} was {was} before the checkpoint and is {now} now; resume with the same options.")


class Keeper:
    """Saves a run at its pace into a folder, and knows what `--resume` found there.

    results: of the inputs that are finished, which are not run again. state: of the input at hand at the checkpoint, as
    `Saveable.state` gave it, None where none was begun. marks: where the outputs stood, empty in a new run. finished:
    the checkpoint is that of a run that came to its end. tokens: of the newest checkpoint, None before the first.
    Raises UsageError where `folder` holds a checkpoint and `resume` is not set; UserError as `CheckpointFolder` does.
    """

    def __init__(
        self, folder: Path, every: str, resume: bool, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pace = Pace.parse(every)
        self.outputs = Outputs()
        self.results: list[dict[str, Any]] = []
        self.state: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.marks: dict[str, Any] = {}
        self.finished = False
        self._tell, self._clock, self._saved_at = tell, clock, clock()
        self._identity: dict[str, Any] = {}
        self.tokens: int | None = None  # all inputs together
        self._folder = CheckpointFolder(folder)
        try:
            self._found = self._find(resume)
        except BaseException:
            self._folder.close()
            raise

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.close()

    def _find(self, resume: bool) -> dict[str, Any]:
        folder = self._folder
        if not resume:
            if not folder.empty:
                raise UsageError(
                    f"--checkpoint {folder.folder}: holds a checkpoint already; go on from it with --resume, or name "
                    "another folder."
                )
            return {}
        found = folder.newest(self._tell)
        if found is None:
            self._tell(f"{folder.folder}: holds no checkpoint yet, so this starts from the beginning.")
            return {}
        body = found.body
        try:
            self.results, self.marks, self.finished = list(body["results"]), dict(body["outputs"]), body["finished"]
            self.state = None if body["run"] is None else (found.tensors, body["run"])
            self.tokens = int(body["tokens"])
            self.outputs.curves = [Curve(**curve) for curve in self.marks.get("--plot", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{found.path}: is damaged ({type(error).__name__}); start anew with another folder."
            ) from None
        return body

    def place(self, dtype: str, device: str, threads: int | None, kernel: str) -> tuple[str, str, int | None, str]:
        """What was left to be chosen is what was chosen at the checkpoint."""
        then = self._found.get("options", {})
        return (
            then.get("dtype", dtype) if dtype == "auto" else dtype,
            then.get("device", device) if device == "auto" else device,
            then.get("threads") if threads is None else threads,
            then.get("kernel", kernel) if kernel == "auto" else kernel,
        )

    def check(self, identity: dict[str, Any], outputs: dict[str, Path | None]) -> None:
        """Refuse to go on where anything differs. identity: of `describe`. outputs: by option, those that grow."""
        given = {option: path for option, path in outputs.items() if path is not None}
        for option, path in given.items():
            if option != "--plot" and path.exists() and not path.is_file():
                raise UsageError(f"{option} {path}: this is no plain file, and --checkpoint may have to cut it back.")
        self._identity = identity
        self.outputs.plotted = "--plot" in given
        if self._found:
            check_same(self._found, identity, self._tell)
            check_outputs_same(self.marks, set(given))

    def keep(self, run: Saveable, stopping: bool) -> None:
        """Between two steps: save if it is time, or if the run is `stopping`."""
        tokens = self._finished_tokens() + run.tokens
        if stopping or self._due(tokens):
            self._save(tokens, *run.state())

    def done(self, result: dict[str, Any], stopping: bool, last: bool) -> None:
        """An input is finished; its result is saved at once if the run is `stopping`, or if it was the `last` one.

        result: JSON-able, with `tokens`.
        """
        self.results.append(result)
        tokens = self._finished_tokens()
        if stopping or last or self._due(tokens):
            self._save(tokens, {}, None, last)

    def _finished_tokens(self) -> int:
        return sum(result["tokens"] for result in self.results)

    def _due(self, tokens: int) -> bool:
        if self.pace.tokens is not None:
            return tokens - (self.tokens or 0) >= self.pace.tokens
        assert self.pace.seconds is not None
        return self._clock() - self._saved_at >= self.pace.seconds

    def _save(
        self, tokens: int, tensors: dict[str, Any], counts: dict[str, Any] | None, finished: bool = False
    ) -> None:
        body = {
            **self._identity,
            "results": self.results,
            "run": counts,
            "outputs": self.outputs.state(),
            "tokens": tokens,
            "finished": finished,
        }
        self._folder.save(body, tensors)
        self.tokens, self._saved_at = tokens, self._clock()

    def where(self) -> str | None:
        """One sentence: what is saved and how to go on; None where nothing is."""
        if self.tokens is None:
            return None
        return f"{self._folder.folder} holds a checkpoint after {self.tokens:,} tokens; --resume goes on from it."
