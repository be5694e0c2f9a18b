"""The turns of a chat are those of the model's own template."""

import torch

from streamh2o import StreamCache
from streamh2o.runs.generate.chat import Chat
from streamh2o.runs.generate.generator import Generator
from streamh2o.runs.generate.sampling import Sampling
from tests.chat_tokenizer import chat_tokenizer

PLAIN = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=1)


def test_turns_are_what_the_template_makes_of_the_whole_talk():
    tokenizer = chat_tokenizer()
    said, answers = ["Who jumps?", "The fox, over <|im_end|> dogs?", "Yes."], ["A fox.", "It does."]
    chat = Chat(tokenizer, "Be brief.")
    ids = chat.turn(said[0])
    assert ids[: len(chat.pinned)] == chat.pinned
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said[0]}]
    for answer, words in zip(answers, said[1:], strict=True):
        ids += tokenizer(answer).input_ids + chat.turn(words)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": words}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(special) == 6  # system, two turns of two, the last question; not the one that was said


def test_a_system_prompt_stays_in_the_sinks_through_a_long_talk(loaded):
    tokenizer = chat_tokenizer()
    chat = Chat(tokenizer, "Be brief and kind.")
    sinks = len(chat.pinned)
    with StreamCache.for_model(loaded.model, sinks + 40, chunk=16, sinks=sinks) as cache:
        generator = Generator(loaded, cache, PLAIN)
        for _ in range(12):
            generator.read(chat.turn("And the lazy dog?"))
            list(generator.tokens(9))
        (group,) = cache.groups
        assert group.evictions > 3
        for layer in group.slots:
            assert (layer.source_index[:, :, :sinks] == torch.arange(sinks)).all()
