"""The perplexity of a long text in twenty lines: python examples/perplexity.py data/sample.txt"""

import math
import sys

import torch

from streamh2o.models import load_model
from streamh2o.policies import make_policy
from streamh2o.stream import Stream
from streamh2o.text import TokenReader, open_inputs

loaded = load_model("smollm2-135m")
policy = make_policy("streamh2o", cache=256)
nll, scored = 0.0, 0
for source in open_inputs(sys.argv[1:]):
    with TokenReader(source, loaded.tokenizer) as reader, Stream(loaded.model, policy, chunk=128) as stream:
        for block in reader.blocks(stream.chunk):
            losses = stream.feed(torch.from_numpy(block.ids)[None]).losses
            nll, scored = nll + float(losses.double().sum()), scored + losses.numel()
            print(f"{stream.tokens:>9} tokens  perplexity {math.exp(nll / scored):8.3f}  {stream.composition()}")
