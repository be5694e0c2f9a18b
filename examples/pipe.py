"""Perplexity of a pipe, while it flows: cat data/sample.txt | python examples/pipe.py"""

import sys

from streamh2o import Stream, load_model

loaded = load_model("smollm2-135m")
with Stream(loaded, cache=256, chunk=128) as stream:
    for line in sys.stdin:
        if len(stream.feed(line)):  # empty until a chunk is full
            print(f"{stream.tokens:>9} tokens  perplexity {stream.ppl:8.3f}  {stream.composition()}", flush=True)
    stream.finish()
    print(f"{stream.tokens:>9} tokens  perplexity {stream.ppl:8.3f}  {stream.composition()}")
