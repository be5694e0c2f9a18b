"""The model `streamh2o` inside lm-evaluation-harness; runs where that is installed: `pip install lm-eval`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamh2o.errors import UsageError
from tests.tiny_folder import TEXT, make_folder

DATA = Path("benchmarks/harness")


def test_the_facts_are_those_of_their_script_and_each_answer_stands_in_its_passage():
    made = subprocess.run([sys.executable, DATA / "make_facts.py"], capture_output=True, text=True, check=True).stdout
    assert made == (DATA / "facts.jsonl").read_text("utf-8")
    for fact in map(json.loads, made.splitlines()):
        assert f"{fact['begin']} {fact['choices'][fact['label']]}." in fact["passage"]
        assert len(set(fact["choices"])) == 4
        assert all(choice in fact["passage"] for choice in fact["choices"])


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_its_command_says_how_to_get_it():
    ran = subprocess.run([sys.executable, "-m", "streamh2o.harness", "--help"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "lm-eval is not installed; install it with: pip install 'streamh2o[harness]'\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_folder(tmp_path_factory.mktemp("model"), bos=True))


@pytest.fixture
def model(folder):
    """`make(policy=..., cache=...)`: the model as lm-eval makes it of `--model_args`."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model

    import streamh2o.harness  # noqa: F401

    return lambda **settings: get_model("streamh2o").create_from_arg_obj(
        {"pretrained": folder, "dtype": "float32", **settings}, {"batch_size": 4, "device": "cpu"}
    )


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


PAIRS = [(TEXT, " It's"), (TEXT, " we"), ("", "The quick"), (TEXT + "The ", "quick brown"), (TEXT, " they'll say")]


def test_with_room_for_everything_the_numbers_are_those_of_the_models_of_lm_eval(model, folder):
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    ours = model(policy="h2o", cache=200)
    expected = theirs.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-2)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    # Of a tokenizer that adds a BOS lm-eval also scores that one, after the BOS that it puts first itself.
    plain = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1, add_bos_token=False)
    rolling = instances("loglikelihood_rolling", (TEXT,), (TEXT[:20],))
    expected = plain.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert ours.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, abs=1e-2)


def test_requests_may_come_in_any_order(model):
    ours = model(policy="h2o", cache="20%")
    found = ours.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True)
    backwards = ours.loglikelihood(instances("loglikelihood", *PAIRS[::-1]), disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in backwards[::-1]], abs=1e-4)


def test_a_task_says_how_to_generate(model):
    ours = model(policy="h2o", cache="20%", max_gen_toks=5)
    asked = [{"until": []}, {"until": [], "max_gen_toks": 9}, {"until": "\n", "do_sample": True, "temperature": 0.7}]
    texts = ours.generate_until(instances("generate_until", *((TEXT, each) for each in asked)), disable_tqdm=True)
    assert texts[1].startswith(texts[0])
    assert "\n" not in texts[2]
    with pytest.raises(UsageError, match="num_beams"):
        ours.generate_until(instances("generate_until", (TEXT, {"num_beams": 4})), disable_tqdm=True)
