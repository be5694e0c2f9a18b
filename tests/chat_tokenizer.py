"""A byte-level tokenizer, without and with the template of a chat."""

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.toy_tokenizers import gpt2

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    toy = Tokenizer.from_str(gpt2().to_str())
    toy.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=toy)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer
