"""Trains a small GPT-NeoX (multi-head attention, a quarter of each head rotated) on Shakespeare: a second family.

    python benchmarks/train_neox.py data/shakespeare.txt models/neox --minutes 10
    tail -c 600000 data/shakespeare.txt > held_out.txt
    streamh2o compare held_out.txt --model models/neox --policy streamingllm,h2o,streamh2o --cache 64,128 --chunk 64

A million weights, 512 positions, a tokenizer of 2,048 words trained on the same text. The last `--held-out` bytes of
the text are never seen in training. The folder is one that `transformers` loads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

VOCABULARY, POSITIONS, BATCH, RATE = 2048, 512, 16, 3e-3


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(text.splitlines(keepends=True), vocab_size=VOCABULARY, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)


def make_model() -> GPTNeoXForCausalLM:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def train(model: GPTNeoXForCausalLM, ids: torch.Tensor, seconds: float, steps: int) -> float:
    """Until `steps` are done or `seconds` have passed; returns the mean loss of the last 50 steps, nats a token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    begun, recent = time.monotonic(), []
    model.train()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - begun) / seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:  # 50 steps up, then down to a tenth in a straight line
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * (1 - 0.9 * done)
        starts = torch.randint(len(ids) - POSITIONS, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + POSITIONS] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent = [*recent[-49:], loss.item()]
        if step % 100 == 0:
            print(f"step {step}, {time.monotonic() - begun:.0f} s: {sum(recent) / len(recent):.3f} nats", flush=True)
    model.eval()
    return sum(recent) / len(recent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10, help="at most so long")
    parser.add_argument("--steps", type=int, default=1000, help="at most so many, of 8,192 tokens each")
    parser.add_argument("--held-out", type=int, default=600_000, help="bytes at the end that training never sees")
    arguments = parser.parse_args()
    text = arguments.text.read_bytes()[: -arguments.held_out].decode("utf-8", "ignore")
    tokenizer, model = make_tokenizer(text), make_model()
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    loss = train(model, ids, 60 * arguments.minutes, arguments.steps)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    print(f"{arguments.folder}: {sum(p.numel() for p in model.parameters()):,} weights, {loss:.3f} nats a token")


if __name__ == "__main__":
    main()
