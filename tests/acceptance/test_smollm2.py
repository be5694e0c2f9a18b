"""The named model as it is installed: its tokens, its special tokens, its sense."""

import time
from pathlib import Path

import pytest
import torch

from streamh2o.models import find as model_files
from streamh2o.models.load import load_model

pytestmark = pytest.mark.skipif(
    model_files.NAMED["smollm2-135m"].path() is None, reason="streamh2o models get smollm2-135m"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_model().tokenizer


def test_the_ids_are_those_the_papers_own_implementations_were_run_on(tokenizer):
    text = "e--the Pioneer and the Minnesotian--the\nPioneer to print the proceedings of the Democratic body"
    ids = [85, 423, 1195, 35868, 284, 260, 12234, 320, 697, 423, 1195, 198, 64, 285, 5551, 288, 1628, 260, 16199, 282]
    assert tokenizer(text).input_ids[: len(ids)] == ids


def test_digits_stand_alone_and_the_spaces_before_them_stay_together(tokenizer):
    assert tokenizer.tokenize("a\n\n1   12 x") == ["a", "ĊĊ", "1", "ĠĠĠ", "1", "2", "Ġx"]


def test_no_bos_is_added_and_the_special_tokens_are_the_models(tokenizer):
    assert len(tokenizer("Hello").input_ids) == 1
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer))
    assert special == (1, 2, 0, 49_152)
    assert tokenizer("<|im_end|>").input_ids == [2]


def test_text_of_every_kind_comes_back_from_its_ids(tokenizer):
    text = (Path(__file__).parents[2] / "data" / "sample.txt").read_text("utf-8") + "\r\n\t  \x00\u200d🏽"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.slow
def test_it_answers_with_sense_and_a_second_start_takes_a_moment():
    loaded = load_model(dtype="float32", device="cpu")
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        ids = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    answer = loaded.tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    start = time.perf_counter()
    load_model(device="cpu")
    assert time.perf_counter() - start < 10
