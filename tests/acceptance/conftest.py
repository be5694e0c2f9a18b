"""The real model. Where its weights are missing, `make setup` gets them."""

import os

import pytest


@pytest.fixture(scope="session")
def loaded():
    import torch

    from streamh2o.models import load_model

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return load_model("smollm2-135m", dtype="float32")
