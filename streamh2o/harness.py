"""The `lm-eval` model `streamh2o`: runs tasks of lm-evaluation-harness under a policy and a budget.

    python -m streamh2o.harness --model streamh2o --model_args pretrained=smollm2-135m,policy=h2o,cache=20% --tasks ...

is the command line of `lm_eval` with this model. `import streamh2o.harness` adds it for `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as missing:
    if __name__ == "__main__" and (missing.name or "").partition(".")[0] == "lm_eval":
        sys.exit("lm-eval is not installed; install it with: pip install 'streamh2o[harness]'")
    raise

import torch
from tqdm import tqdm

from streamh2o.errors import UsageError, UserError
from streamh2o.models.load import load_model
from streamh2o.models.loaded import Loaded
from streamh2o.runs.generate.sampling import Sampling
from streamh2o.runs.scoring import Scorer

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # what tasks call it; first wins
_ONE = ("num_beams", "num_return_sequences")  # may be given, as 1


@register_model("streamh2o")
class StreamH2OLM(TemplateLM):
    """A model of `transformers` behind a cache of fixed size.

    pretrained: as `--model`. policy, cache, evict, chunk, sinks and the policy's knobs: see `Scorer`. dtype, device,
    trust_remote_code: as for `load_model`. max_gen_toks: the most new tokens where a task gives none. loaded: a loaded
    model instead of `pretrained`. batch_size is accepted, but requests go one by one, so that no result depends on
    others.
    """

    def __init__(
        self,
        pretrained: str = "smollm2-135m",
        policy: str = "streamh2o",
        cache: int | float | str = "20%",
        *,
        dtype: str = "auto",
        device: str | None = None,
        trust_remote_code: bool = False,
        max_gen_toks: int = 256,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        loaded: Loaded | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # lm-eval's own default
        self.loaded = loaded or load_model(pretrained, dtype, device or "auto", trust_remote_code)
        self.tokenizer = self.loaded.tokenizer
        self.scorer = Scorer(self.loaded, policy, cache, **settings)
        self.max_gen_toks = max_gen_toks
        self.batch_size = 1
        self._device = self.loaded.device
        if self.prefix_token_id is None:
            raise UserError("lm-eval predicts a first token from a BOS or end-of-text token; this tokenizer has none.")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The BOS, or the end of text where there is none, as lm-eval's own `hf` model has it."""
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.loaded.trained_positions

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of `string`; None adds what the tokenizer adds by itself, but no second BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Requests that share a context, as the choices of a question do, share one reading of it."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            groups.setdefault(tuple(self.scorer.fit(context, len(continuation))), []).append(number)
        results: list[Any] = [None] * len(requests)
        bar = tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm)
        for shared, numbers in groups.items():
            scores = self.scorer.loglikelihoods(shared, [requests[number][2] for number in numbers])
            for number, score in zip(numbers, scores, strict=True):
                results[number] = score
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
            bar.update(len(numbers))
        bar.close()
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        results = []
        for request in tqdm(requests, desc="Running loglikelihood_rolling requests", disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            results.append(self.scorer.rolling(ids, self.prefix_token_id))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        results = []
        for request in tqdm(requests, desc="Running generate_until requests", disable=disable_tqdm):
            context, asked = request.args
            until, most, sampling = self._generation_settings(asked)
            ids = self.scorer.fit(self.tok_encode(context) or [self.prefix_token_id], most)
            results.append(self.scorer.generate(ids, until, most, sampling))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def _generation_settings(self, asked: dict[str, Any]) -> tuple[list[str], int, Sampling]:
        """A task's generation arguments as stop strings, most tokens, and sampling."""
        left = dict(asked)
        until = left.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        lengths = [int(value) for name in _LENGTHS if (value := left.pop(name, None)) is not None]
        temperature = float(left.pop("temperature", None) or 0.0)
        samples = left.pop("do_sample", None)
        top_k, top_p, min_p = (left.pop(name, None) for name in ("top_k", "top_p", "min_p"))
        penalty = float(left.pop("repetition_penalty", None) or 1.0)
        for name in _ONE:
            if left.get(name) in (1, None):
                left.pop(name, None)
        if left:
            raise UsageError(f"The model streamh2o does not know the generation argument {', '.join(sorted(left))}.")
        if samples is None:
            samples = temperature > 0
        sampling = Sampling(
            temperature=temperature or 1.0,
            top_k=50 if top_k is None else int(top_k),  # what `generate` of transformers takes
            top_p=1.0 if top_p is None else float(top_p),
            min_p=0.0 if min_p is None else float(min_p),
            repetition_penalty=penalty,
            greedy=not samples,
            seed=int(torch.randint(2**31, ())) if samples else 0,  # from lm-eval's own seed
        )
        return until, lengths[0] if lengths else self.max_gen_toks, sampling


def main() -> None:
    """The command line of `lm_eval`, with errors as one sentence."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
