"""The loop for Python: text or ids of any length in, losses out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from streamh2o.errors import UsageError, UserError
from streamh2o.kernels.select import Kernel
from streamh2o.policies import Policy, make_policy
from streamh2o.stream.chunk_stream import ChunkStream
from streamh2o.stream.given_model import ModelAndTokenizer, kernel_for, model_and_tokenizer
from streamh2o.text.incremental import IncrementalTokenizer
from streamh2o.text.reader import bos_id

_STATE = {"settings", "tensors", "counts", "losses", "waiting", "text"}  # what `Stream.state` gives


class Stream:
    """A text of any length through `model`, with a cache of `cache` slots per layer and KV head.

    model: what `load_model` returns, or a causal model of `transformers` in evaluation mode, with its fast `tokenizer`
    where text is fed; the model is its own between chunks. policy: a name, whose budget is sinks + recent + hitters =
    cache, with the policy's further fields as `knobs`, or a policy made by `make_policy` (then these numbers are its
    own). chunk: most tokens of one pass, after which the cache evicts. bos: `auto` puts a BOS before the first token
    where the tokenizer itself would, `yes`, `no`. allow_special: let strings such as `<|im_end|>` in the text be
    special tokens. kernel: `auto` (that of `load_model`, or the best there is), `compiled`, `torch`, or one that was
    selected. evict, kv_bits, engine: as of ChunkStream.

    Raises UsageError for settings that do not go together or do not fit the model, UserError for a model that is not
    supported or a cache that does not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelAndTokenizer,
        tokenizer: Any = None,
        *,
        cache: int = 1024,
        policy: str | Policy = "streamh2o",
        sinks: int | None = None,
        recent: int | None = None,
        hitters: int | None = None,
        chunk: int = 256,
        bos: str = "auto",
        allow_special: bool = False,
        evict: str = "chunk",
        kv_bits: int = 16,
        kernel: str | Kernel = "auto",
        engine: bool = True,
        **knobs: Any,
    ) -> None:
        if isinstance(tokenizer, str | Policy):
            raise UsageError(f"Stream's second argument is a tokenizer, not {tokenizer!r}; say policy={tokenizer!r}.")
        kernel = kernel_for(model, kernel)
        model, own_tokenizer = model_and_tokenizer(model)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
        if isinstance(policy, str):
            policy = make_policy(policy, cache, sinks=sinks, recent=recent, hitters=hitters, **knobs)
        self._text = None if tokenizer is None else IncrementalTokenizer(tokenizer, allow_special)
        self._bos = None if tokenizer is None else bos_id(tokenizer, bos)
        self._stream = ChunkStream(
            model, policy, chunk=chunk, evict=evict, kv_bits=kv_bits, kernel=kernel, engine=engine
        )
        self._waiting = torch.empty(0, dtype=torch.int64)  # ids that have not been read
        self._begun = False  # whether there were any
        self._losses: list[Tensor] = []
        self._reading = False  # or it was cut off in it

    def feed(self, text_or_ids: str | Sequence[int] | Tensor) -> Tensor:
        """Read on. Returns the losses of the tokens read now, float32 [n], nats, on the CPU.

        text_or_ids: a piece of text, or ids: a list, or a tensor [n] or [1, n]. Text may be cut anywhere: it goes
        through in whole chunks of the ids of the whole, and the rest, with some 4,000 characters whose ids may depend
        on what follows, waits for more, for `finish`, or for ids, which are read at once. The stream's first token has
        no loss. Raises UserError where the text outgrows a policy that evicts nothing.
        """
        if isinstance(text_or_ids, str):
            if self._text is None:
                raise UsageError("This Stream was made without a tokenizer and takes ids; give it one to feed text.")
            self._wait(self._text.add(text_or_ids))
            return self._read(len(self._waiting) // self._stream.chunk * self._stream.chunk)
        ids = self._checked(text_or_ids)
        before = self.finish()
        self._wait(ids.flatten().numpy(force=True))
        return torch.cat([before, self._read(len(self._waiting))])

    def _checked(self, given: Any) -> Tensor:
        """Ids as a tensor; of what is none a UsageError."""
        try:
            ids = torch.as_tensor(given, dtype=None if len(given) else torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"A Stream takes text, or ids as a list or a tensor, not a {type(given).__name__}."
            ) from None
        if ids.is_floating_point() or ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != 1):
            raise UsageError(f"ids are whole numbers, a list or a tensor [n] or [1, n], not {tuple(ids.shape)}.")
        words = self._stream.model.config.get_text_config().vocab_size
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < words:
            raise UsageError(f"ids lie between 0 and {words - 1} with this model, and one is not among them.")
        return ids

    def finish(self) -> Tensor:
        """The text has ended: read what waits. Returns its losses; text that is fed later is tokenised on its own."""
        if self._text is not None:
            self._wait(self._text.end())
        return self._read(len(self._waiting))

    def _wait(self, ids: NDArray[Any]) -> None:
        """Let `ids` [n] wait to be read, the first of all behind a BOS."""
        if len(ids) and not self._begun:
            self._begun = True
            ids = ids if self._bos is None else np.insert(ids, 0, self._bos)
        self._waiting = torch.cat([self._waiting, torch.from_numpy(ids.astype(np.int64))])

    def _read(self, count: int) -> Tensor:
        """The losses of the first `count` ids that wait."""
        first = len(self._losses)
        if self._reading:
            raise UserError("This stream was cut off while it read, so its losses have a hole; make another.")
        for part in self._waiting[:count].split(self._stream.chunk):
            if len(part):
                self._stream.require_room(part[None])  # what is refused before it is read leaves no hole
                self._reading = True
                self._losses.append(self._stream.feed(part[None]).losses[0].cpu())
                self._waiting = self._waiting[len(part) :]
                self._reading = False
        return torch.cat([torch.empty(0), *self._losses[first:]])

    @property
    def losses(self) -> Tensor:
        """Of every token so far but the first, float32 [tokens - 1], nats: four bytes a token is all that grows."""
        self._losses = [torch.cat([torch.empty(0), *self._losses])]
        return self._losses[0]

    @property
    def ppl(self) -> float:
        """e to the mean of `losses`; NaN before there are any."""
        return math.exp(self.losses.double().mean()) if self.losses.numel() else math.nan

    @property
    def tokens(self) -> int:
        """Read so far, a BOS included; what waits is not."""
        return self._stream.tokens

    @property
    def slots(self) -> int:
        """Slots per layer and KV head now."""
        return self._stream.slots

    @property
    def evictions(self) -> int:
        """How often the cache has evicted."""
        return self._stream.evictions

    def composition(self) -> dict[str, int]:
        """Slots per layer and KV head now: sinks, hitters, recent."""
        return self._stream.composition()

    def state(self) -> dict[str, Any]:
        """All that another Stream of the same model and settings needs to go on with the same digits.

        Tensors, strings and numbers, for `torch.save` and `torch.load`; later feeding leaves them as they are.
        """
        tensors, counts = self._stream.state()
        return {
            "settings": self._settings(),
            "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
            "counts": counts,
            "losses": self.losses.clone(),
            "waiting": self._waiting.clone(),
            "text": None if self._text is None else self._text.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave. Raises UserError where it is damaged, another model's, or of other settings."""
        missing = sorted(_STATE - (state.keys() if isinstance(state, dict) else set()))
        if missing:
            raise UserError(f"This is no state of a Stream: it lacks {', '.join(missing)}.")
        if state["settings"] != self._settings():
            raise UserError(f"The state is of {state['settings']}, and this Stream is of {self._settings()}.")
        tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        self._stream.load_state(tensors, state["counts"])
        self._losses, self._waiting = [state["losses"]], state["waiting"]
        self._begun, self._reading = self.tokens > 0 or len(self._waiting) > 0, False
        if self._text is not None and state["text"] is not None:
            self._text.load(state["text"])

    def _settings(self) -> str:
        stream = self._stream
        return f"{stream.policy} in chunks of {stream.chunk}, {stream.kv_bits} bits, evicting by {stream.evict}"

    def close(self) -> None:
        """End the stream. What waits of the text is forgotten."""
        self._stream.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
