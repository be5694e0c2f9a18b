"""Half a million tokens through one pipe: memory stays flat, the last tenth is as fast as the first.

    python -m tests.acceptance.soak BOOK... [--tokens 500000] [--out results/soak]

runs `cat BOOK... | streamh2o ppl -` with a log and checkpoints, and judges the log. With --resume a run that was
stopped goes on; `--judge LOG` judges a log alone. Where other programs share the machine a clock says little over half
an hour; `--race` reads so many tokens, fills a second cache, and then both streams read the same chunks in turn.
Exit code 0 where all holds, 1 where something does not.
"""

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from streamh2o.models.load import load_model
from streamh2o.policies import make_policy
from streamh2o.runs.bench import stream_speed as bench
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.text import TokenReader, open_inputs

MOST_GROWTH = 10_000_000  # bytes, after the cache has filled and a checkpoint has been saved
LEAST_SPEED = 0.95  # of the first tenth's, for the last tenth's


def judge(lines: list[dict], cache: int) -> dict[str, float]:
    """Of the log after the cache filled: growth of memory in bytes, and speed of the last tenth to that of the first.

    Memory is the most that a tenth held, so that both hold a checkpoint being saved.
    """
    full = [line for line in lines if line["slots"] >= cache]
    tenth = len(full) // 10
    if not tenth:
        sys.exit(f"{len(full)} lines of the log have a full cache of {cache}; 10 are needed at least: more --tokens.")
    first, last = full[:tenth], full[-tenth:]
    most = [max(line["rss_bytes"] for line in part) for part in (first, last)]
    speed = [statistics.median(line["tokens_per_second"] for line in part) for part in (first, last)]
    return {"growth": most[1] - most[0], "speed": speed[1] / speed[0], "tokens": lines[-1]["token"]}


def run(options: argparse.Namespace) -> int:
    """The run itself; its exit code."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "streamh2o", "ppl", "-", "--model", options.model, "--threads", "1"]
    command += ["--cache", str(options.cache), "--max-tokens", str(options.tokens), "--log", str(out / "log.jsonl")]
    command += ["--checkpoint", str(out / "saved"), "--checkpoint-every", "30s", "--json", str(out / "result.json")]
    command += ["--resume"] if options.resume else []
    with subprocess.Popen(["cat", *options.books], stdout=subprocess.PIPE) as books:
        return subprocess.run(command, stdin=books.stdout).returncode


def race(options: argparse.Namespace) -> int:
    """Whether a stream is as fast after `options.tokens` tokens as one whose cache has just filled; the exit code."""
    torch.set_num_threads(1)
    loaded, policy = load_model(options.model), make_policy("streamh2o", options.cache)
    old, young = (ChunkStream(loaded.model, policy) for _ in range(2))
    chunks = (
        torch.from_numpy(block.ids)[None]
        for source in open_inputs(options.books)
        for block in iter(partial(TokenReader(source, loaded.tokenizer).read, old.chunk), None)
    )
    while old.tokens < options.tokens:
        piece = next(chunks)
        old.feed(piece)
    while young.evictions < 2:
        young.feed(piece)
    age = old.tokens
    contestants = {name: (piece.shape[1], partial(each.feed, piece)) for name, each in (("old", old), ("young", young))}
    timings = bench.race(contestants, rounds=200)
    speed = bench.ratio(*timings)
    print(f"After {age:,} tokens a chunk runs at {speed:.3f} of the speed of one whose cache has just filled.")
    return 0 if speed >= LEAST_SPEED else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", nargs="*")
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--cache", type=int, default=512)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--race", action="store_true")
    parser.add_argument("--judge", type=Path, metavar="LOG")
    options = parser.parse_args()
    if options.race:
        return race(options)
    if options.judge is None and (code := run(options)):
        return code
    log = options.judge or options.out / "log.jsonl"
    found = judge([json.loads(line) for line in log.read_text().splitlines()], options.cache)
    holds = {
        "memory": found["growth"] < MOST_GROWTH,
        "speed": found["speed"] >= LEAST_SPEED,
        "tokens": options.judge is not None or found["tokens"] == options.tokens,
    }
    print(f"{found['tokens']:,} tokens; memory grew by {found['growth'] / 1e6:.1f} MB after the cache had filled;")
    print(f"the last tenth ran at {found['speed']:.3f} of the first tenth's speed.")
    print("All holds." if all(holds.values()) else f"Not held: {', '.join(n for n in holds if not holds[n])}.")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
