"""The real model. Where its weights are missing, `make setup` gets them."""

import pytest


@pytest.fixture(scope="session")
def loaded():
    from streamh2o.models.load import load_model

    return load_model("smollm2-135m", dtype="float32")
