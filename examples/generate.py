"""10,000 tokens from `model.generate`, in the memory of 1,024: python examples/generate.py"""

from transformers import TextStreamer

from streamh2o import StreamCache, load_model

loaded = load_model("smollm2-135m")
prompt = loaded.tokenizer("It was a dark and stormy night, and", return_tensors="pt")
with StreamCache.for_model(loaded, cache=1024) as cache:
    loaded.model.generate(
        **prompt,
        cache=cache,  # past_key_values before transformers 5.23
        max_new_tokens=10_000,
        min_new_tokens=10_000,  # the model would end the text earlier
        do_sample=True,
        repetition_penalty=1.1,
        streamer=TextStreamer(loaded.tokenizer),
    )
    print(f"\n{cache.get_seq_length()} tokens, {cache.slots} slots, {cache.evictions} evictions")
