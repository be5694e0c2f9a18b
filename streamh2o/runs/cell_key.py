"""Which finished cell of `compare` and `needle` may be used again: one with the same key."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from streamh2o.versions import __version__

if TYPE_CHECKING:
    from streamh2o.models.loaded import Loaded


def cell_key(schema: int, loaded: Loaded, parts: dict[str, Any]) -> str:
    """16 hexadecimal digits for all that a cell's content depends on.

    schema: of the cell's file, counted up when what is computed or saved changes. parts: JSON-able; what the cell
    depends on besides the model, its number format and device, and this package's version.
    """
    depends = {
        "schema": schema,
        "version": __version__,
        "model": loaded.fingerprint,
        "weights": loaded.weights,
        "dtype": str(loaded.dtype),
        "device": loaded.device.type,
        **parts,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
