"""Perplexity of a book under three policies: python examples/book.py data/sample.txt"""

import sys

import streamh2o

loaded = streamh2o.load_model("smollm2-135m")
for policy in ("streamh2o", "h2o", "streamingllm"):
    result = streamh2o.perplexity(sys.argv[1], model=loaded, policy=policy, cache=256)
    print(f"{policy:<14} {result.tokens:>9} tokens  perplexity {result.ppl:.3f}")
