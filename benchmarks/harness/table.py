"""Puts the policies at 4, 20 and 60 % of each prompt side by side, by lm-eval's own command line: table.py FOLDER.

Run it from the root of the repository. Each run leaves lm-eval's results and samples in a folder of its own below
FOLDER, and one that is there already is not run again. Needs lm-eval: pip install 'streamh2o[harness]'.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

FACTS, STORY = "streamh2o_facts", "streamh2o_story"
SHARES = (4, 20, 60)
RUNS = {"full": "policy=full"} | {
    f"{policy}-{share}": f"policy={policy},cache={share}%"
    for share in SHARES
    for policy in ("local", "streamingllm", "h2o", "streamh2o")
}


def run(arguments: str, folder: Path) -> None:
    """All of both tasks; what lm-eval prints goes to stderr."""
    command = [sys.executable, "-m", "streamh2o.harness", "--model", "streamh2o"]
    command += ["--model_args", f"pretrained=smollm2-135m,{arguments}", "--include_path", "benchmarks/harness"]
    command += ["--tasks", f"{FACTS},{STORY}", "--output_path", str(folder), "--log_samples"]
    subprocess.run(command, stdout=sys.stderr, check=True)


def newest(folder: Path, pattern: str) -> Path | None:
    return max(folder.glob(f"*/{pattern}"), default=None)  # the time is in the name


def right(folder: Path) -> list[float]:
    """For each question whether it was answered rightly."""
    samples = newest(folder, f"samples_{FACTS}_*.jsonl")
    assert samples is not None
    rows: list[dict[str, Any]] = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    return [row["acc"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folders = {name: Path(sys.argv[1]) / name for name in RUNS}
    for name, folder in folders.items():
        if newest(folder, "results_*.json") is None:
            run(RUNS[name], folder)
    print(f"| policy | cache | {FACTS}: acc | less full's, same questions | {STORY}: bits per byte | word perplexity |")
    print("| --- | --- | --- | --- | --- | --- |")
    everything = right(folders["full"])
    for name, folder in folders.items():
        results = newest(folder, "results_*.json")
        assert results is not None
        tasks = json.loads(results.read_text("utf-8"))["results"]
        facts, story = tasks[FACTS], tasks[STORY]
        less = [own - full for own, full in zip(right(folder), everything, strict=True)]
        policy, _, share = name.partition("-")
        cells = [policy, f"{share} %" if share else "all"]
        cells += [f"{facts['acc,none']:.3f} ± {facts['acc_stderr,none']:.3f}"]
        cells += [f"{mean(less):+.3f} ± {error(less):.3f}" if share else ""]
        cells += [f"{story['bits_per_byte,none']:.4f}", f"{story['word_perplexity,none']:.1f}"]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
