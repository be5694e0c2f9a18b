"""Writes docs/models.md from the table of families and the cases that are tested: `python -m tests.models_page`."""

from collections import Counter
from pathlib import Path
from typing import Any

from streamh2o.cache.alibi import AlibiTable
from streamh2o.cache.families import SUPPORTED
from streamh2o.cache.rotary import Rotary, RotaryTable
from streamh2o.models.load import TRANSFORMERS
from tests import families

ABOVE = """\
# Models

<!-- Made by `python -m tests.models_page` from streamh2o/cache/families.py and tests/families.py; do not edit. -->

`streamh2o` runs the families below, by the `model_type` of their `config.json`, with `transformers` from {first} to
below {end}. Each of them is tested with tiny random models at both ends of that range (`tests/cache/test_families.py`).
Read in chunks of several sizes, they give the losses of plain `transformers` (float32, 1e-4) while nothing is evicted.
Under eviction they keep their budget, their sinks and their newest tokens. A token never changes a loss before it.

Beside that, every model is tried on 32 tokens when it is loaded, in chunks and by `transformers` alone, and is not run
where the two do not agree. `streamh2o doctor --model NAME` does the same with more tokens and tells the differences.

| `model_type` | models | positions | layers with a window | tested |
| --- | --- | --- | --- | --- |
"""

BELOW = """
Rotary positions of every type that `transformers` has for these families are read off the model itself; tested are
default, linear, dynamic, yarn, llama3 and longrope.

- **dynamic** rope stays within its first length, where it is plain rope: positions are those inside the cache.
- **longrope** (Phi-3) has two sets of angles, for texts up to its first length and for longer ones. A stream takes the
  first where `--cache` and `--chunk` together fit into it, else the second, from its first token on; so `--policy full`
  reads up to the first length with the first, and further with a `--cache` beyond it.
- **Learned positions** (GPT-2, OPT) belong to the token's place in the text and cannot be given anew. A text longer
  than the model's positions is refused at the token that exceeds them; up to there the cache evicts as elsewhere. Only
  `--policy recompute` goes on, since its window begins at position 0 each time.
- **Layers with a window** (sliding-window attention) look at the slots whose distance *inside the cache* is less than
  the window. With a window larger than cache and chunk that is all of them, sinks and hitters too, as in StreamingLLM's
  runs of Mistral. With one that `--recent` covers, such a layer sees exactly what it sees in plain `transformers`,
  whatever is evicted; sinks and hitters then matter only to the layers without a window. All layers hold the same
  number of slots.
- **ALiBi** (BLOOM, MPT, some Falcons) adds to a logit what grows with the distance, by a slope for each head. Distances
  are those inside the cache; at `distance` positions a hitter's is its true one. `--evict token` is refused. Where the
  configuration does not say for how many tokens the model was trained (BLOOM), 2,048 are taken, and never more than
  65,536. Near biases are exact here. `transformers` rounds BLOOM's in bfloat16, and Falcon's in every type, the more
  the longer the text, so that from a few hundred tokens on the two differ by more than with other families.
- **Attention of their own**: the code of BLOOM, Falcon and MPT in `transformers` lets no attention be chosen. While a
  stream or a StreamCache works, their attention modules get another `forward`, which is taken away after it. With
  `--device-map`, which does the same, they are refused. MPT's configurations say `use_cache=False`: give `generate`
  `use_cache=True` along with a StreamCache.

Refused is every other `model_type`, and any model whose tokens look ahead.
"""


def page() -> str:
    first, end = TRANSFORMERS
    rows = [_row(family) for family in SUPPORTED]
    return ABOVE.format(first=first, end=end) + "".join(rows) + BELOW


def _row(family: str) -> str:
    cases = list(families.of_family(family))
    title = SUPPORTED[family].title
    if SUPPORTED[family].since:
        title += f" (transformers {SUPPORTED[family].since} or later)"
    windows = {_windows(case.config().get_text_config()) for case in cases} - {""}
    tested = ["GQA" if case.kv_heads < 8 else "MHA" for case in cases]
    tested = [*dict.fromkeys(tested), *(case.variant for case in cases if case.variant not in ("", "mha"))]
    cells = (f"`{family}`", title, _positions(family, cases), ", ".join(sorted(windows)), ", ".join(tested))
    return "| " + " | ".join(cells) + " |\n"


def _positions(family: str, cases: list[families.Case]) -> str:
    if SUPPORTED[family].learned_positions:
        return "learned"
    sloped = [isinstance(Rotary.from_model(case.model(), 16).tables[0], AlibiTable) for case in cases]
    if sloped[0]:
        return "ALiBi"
    return _rotation(cases[0]) + (", or ALiBi" if any(sloped) else "")


def _rotation(case: families.Case) -> str:
    tables = Rotary.from_model(case.model(), 16).tables
    turning = [table for table in tables if isinstance(table, RotaryTable)]
    text = f"rotary, {turning[0].style}"
    share = turning[0].rotary_dim / 8  # of the head's 8 components
    if share < 1:
        text += ", part of a head"
    if len(turning) < len(tables):
        text += ", not in all layers"
    if len(set(map(id, turning))) > 1:
        text += ", two tables"
    return text


def _windows(config: Any) -> str:
    kinds = Counter(getattr(config, "layer_types", None) or ())
    if kinds["sliding_attention"]:
        return "some" if kinds["full_attention"] else "all"
    return "all, where set" if config.model_type in ("mistral", "phi3") and config.sliding_window else ""


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "models.md"
    target.write_text(page(), encoding="utf-8")
