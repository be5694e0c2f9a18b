"""Speed on a machine that other programs use: `streamh2o bench --shared`.

Three processes with a stream each load the model once and work in turn: two that watch for other programs (see
`spinning.py`), and one whose threads spin as PyTorch's do by default.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from streamh2o.errors import INTERRUPTED, UserError
from streamh2o.spinning import Watch

SECONDS = 5.0  # of each measurement
WANTED = {"busy": 0.47, "pair": 0.90, "watch": 0.98}


@dataclass(frozen=True)
class Work:
    """What every process streams: random tokens through a full cache."""

    model: str
    dtype: str
    weights: str
    device: str
    threads: int | None
    kernel: str
    trust_remote_code: bool
    policy: str
    cache: int
    chunk: int
    watch: bool = True


class Worker:
    """A process with a warm stream that works when it is asked to. Raises UserError where it ends too early."""

    def __init__(self, work: Work) -> None:
        command = [sys.executable, "-m", "streamh2o.runs.bench.shared", json.dumps(asdict(work))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def answer(self) -> Any:
        """What the process says next: a dict once its cache is full, then tokens per second."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError("--shared: a process of the benchmark ended too early; its message stands above.")
        return json.loads(line)

    def start(self, seconds: float) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `answer` says so
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def speed(self, seconds: float) -> float:
        """Tokens per second of the whole chunks within `seconds`."""
        self.start(seconds)
        return float(self.answer())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def bench_shared(
    work: Work, rounds: int = 5, seconds: float | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Time a stream alone, beside one busy core, as one of two, and alone without the watch, in turn.

    seconds: of each measurement, `SECONDS` for None.

    Returns plain numbers: what was streamed and how; `rounds`, each with tokens per second `alone`, `busy`, `pair` and
    `unwatched`, and their medians in `tokens_per_second`; `ratios`, each with its `name`, its `ratio` (the median over
    the rounds) and what is `wanted`.
    """
    seconds = seconds or SECONDS
    with ExitStack() as stack:
        workers = [Worker(replace(work, watch=watch)) for watch in (True, True, False)]
        for worker in workers:
            stack.callback(worker.close)
        about, *_ = [worker.answer() for worker in workers]
        found = []
        for turn in range(rounds):
            tell(f"round {turn + 1} of {rounds}")
            found.append(_round(workers, seconds))
    return {
        **about,
        "cache": work.cache,
        "chunk": work.chunk,
        "seconds": seconds,
        "rounds": found,
        "tokens_per_second": {name: median(each[name] for each in found) for name in found[0]},
        "ratios": ratios(found),
    }


def _round(workers: list[Worker], seconds: float) -> dict[str, float]:
    first, second, unwatched = workers
    found = {"alone": first.speed(seconds)}
    with busy_core():
        found["busy"] = first.speed(seconds)
    for worker in (first, second):
        worker.start(seconds)
    found["pair"] = first.answer() + second.answer()
    found["unwatched"] = unwatched.speed(seconds)
    return found


def ratios(rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Medians over the rounds of what is compared within one, and what is wanted."""
    pairs = {
        "busy": ("beside one busy core / alone", "busy", "alone"),
        "pair": ("two side by side, together / alone", "pair", "alone"),
        "watch": ("alone / alone without the watch", "alone", "unwatched"),
    }
    return [
        {"name": name, "ratio": median(each[a] / each[b] for each in rounds), "wanted": WANTED[key]}
        for key, (name, a, b) in pairs.items()
    ]


@contextmanager
def busy_core() -> Iterator[None]:
    """Another program that uses one core all the time."""
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def speed_of(feed: Callable[[], object], tokens: int, seconds: float) -> float:
    """Tokens per second of the calls that end within `seconds`, at least of one; each is `tokens` tokens."""
    start = now = time.perf_counter()
    calls, until = 0, start
    while not calls or now - start < seconds:
        feed()
        now = time.perf_counter()
        if not calls or now - start < seconds:  # a call that ends later may have had the machine to itself
            calls, until = calls + 1, now
    return calls * tokens / (until - start)


def serve(work: Work) -> None:
    """The process of a Worker: a number for every line on stdin, which says for how many seconds to work."""
    import torch

    from streamh2o.machine import physical_cores
    from streamh2o.models.load import load_model
    from streamh2o.runs.bench.stream_speed import WarmStream, random_ids

    torch.set_num_threads(work.threads or physical_cores())
    loaded = load_model(
        work.model,
        work.dtype,
        work.device,
        work.trust_remote_code,
        selftest=False,
        weights=work.weights,
        kernel=work.kernel,
    )
    ids = random_ids(loaded.model, work.cache + 8 * work.chunk)
    with torch.inference_mode():
        stream = WarmStream(loaded.model, ids, work.policy, work.cache, work.chunk, kernel=loaded.kernel)
        if work.watch:
            Watch().start()
        about: dict[str, Any] = {"dtype": str(loaded.dtype).removeprefix("torch."), "device": str(loaded.device)}
        about |= {"model": loaded.info(), "threads": torch.get_num_threads(), "kernel": loaded.kernel.name}
        print(json.dumps(about), flush=True)
        for line in sys.stdin:
            print(speed_of(stream.feed, work.chunk, float(line)), flush=True)


if __name__ == "__main__":
    try:
        serve(Work(**json.loads(sys.argv[1])))
    except UserError as error:
        sys.exit(f"streamh2o: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
