"""Makes the pictures of README from a long text of your own:

    make data
    python docs/pictures/make.py data/shakespeare.txt

live.svg: what `streamh2o ppl` shows on a terminal, once on the way and at the end. compare.png: the picture of running
perplexity that `streamh2o compare` draws. Both files hold what was measured on the machine that made them.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE, TOKENS = 512, 8000
SHOWN = 0.6  # of the text, after which the live display is taken


def live(text: str) -> str:
    """The terminal of one run as SVG, in the reader's own monospaced font."""
    from rich.console import Console

    from streamh2o.models.load import load_model
    from streamh2o.policies import make_policy
    from streamh2o.report.live import frame
    from streamh2o.report.perplexity_summary import render_perplexity
    from streamh2o.runs.options import RunOptions
    from streamh2o.runs.perplexity_run import PerplexityRun
    from streamh2o.terminal import safe_text
    from streamh2o.text.sources import open_inputs

    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    name, shown = Path(text).name, []

    (source,) = open_inputs([text])
    policy, options = make_policy("streamh2o", cache=CACHE), RunOptions(max_tokens=TOKENS)
    with PerplexityRun(load_model(), source, policy, options) as run:
        for progress in run.chunks():
            if not shown and progress.fraction >= SHOWN:
                shown.append(frame(name, progress))
        result = run.result()
    result["input"]["name"] = name
    console.print(safe_text(f"$ streamh2o ppl {name} --cache {CACHE} --max-tokens {TOKENS}", "bold green"))
    console.print(*shown)
    console.print(safe_text("…", "dim"))
    console.print(render_perplexity([result]))
    svg = console.export_svg(title="streamh2o ppl", unique_id="live")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich's fonts lie on a server


def compare(text: str) -> bytes:
    """The picture of `compare`, in few colours so that it is small."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "streamh2o", "compare", text, "--cache", "256,512", "--out", out]
        subprocess.run([*command, "--max-tokens", str(TOKENS)], check=True)
        picture = io.BytesIO()
        Image.open(Path(out) / "running.png").convert("RGB").quantize(64).save(picture, "png", optimize=True)
    return picture.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    (HERE / "live.svg").write_text(live(sys.argv[1]) + "\n", encoding="utf-8")
    (HERE / "compare.png").write_bytes(compare(sys.argv[1]))
