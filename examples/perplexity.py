"""The perplexity of a long text in twenty lines: python examples/perplexity.py data/sample.txt"""

import sys

from streamh2o import Stream, load_model

loaded = load_model("smollm2-135m")
with (
    open(sys.argv[1], encoding="utf-8") as book,
    Stream(loaded.model, loaded.tokenizer, cache=256, chunk=128) as stream,
):
    for line in book:
        if len(stream.feed(line)):
            print(f"{stream.tokens:>9} tokens  perplexity {stream.ppl:8.3f}  {stream.composition()}")
    stream.finish()
    print(f"{stream.tokens:>9} tokens  perplexity {stream.ppl:8.3f}  {stream.composition()}")
