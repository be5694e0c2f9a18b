"""A chat in the memory of 1,024 tokens: python examples/chat.py. An empty line ends it."""

import torch
from transformers import TextStreamer

from streamh2o import StreamCache, load_model

loaded = load_model("smollm2-135m")
model, tokenizer = loaded.model, loaded.tokenizer
show = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
messages = [{"role": "system", "content": "You are a patient teacher."}]
ids, seen = torch.empty(1, 0, dtype=torch.long), ""  # all of the chat so far, as ids and as text
with StreamCache.for_model(loaded, cache=1024) as cache:
    while said := input("> "):
        messages.append({"role": "user", "content": said})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        new = tokenizer(text[len(seen) :], add_special_tokens=False, return_tensors="pt").input_ids
        prompt = torch.cat([ids, new], dim=1)
        ids = model.generate(  # reads only what is new; past_key_values=cache before transformers 5.23
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=cache,
            max_new_tokens=300,
            do_sample=True,
            streamer=show,
        )
        answer = ids[0, prompt.shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        seen = text + tokenizer.decode(answer)
