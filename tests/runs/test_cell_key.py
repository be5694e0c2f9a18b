from dataclasses import replace

import torch

from streamh2o.runs import cell_key as module
from streamh2o.runs.cell_key import cell_key


def test_a_key_changes_with_schema_version_model_and_parts_and_with_nothing_else(loaded, monkeypatch):
    parts = {"a": 1, "b": [2]}
    key = cell_key(1, loaded, parts)
    assert cell_key(1, replace(loaded, name="renamed"), {"b": [2], "a": 1}) == key
    others = [
        cell_key(2, loaded, parts),
        cell_key(1, loaded, {"a": 1, "b": [3]}),
        cell_key(1, replace(loaded, fingerprint="another"), parts),
        cell_key(1, replace(loaded, weights="packed"), parts),
        cell_key(1, replace(loaded, dtype=torch.bfloat16), parts),
    ]
    monkeypatch.setattr(module, "__version__", "0.0.0")
    others.append(cell_key(1, loaded, parts))
    assert len({key, *others}) == 7
