"""Packed SFT data for Megatron-Core: stored in any format, fed to training, and proven to be the same.

The public names load on first use, so that `import harness` needs no more than Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.errors import HarnessError
    from harness.formats import open_dataset, open_writer
    from harness.loader import Loader, LoaderConfig
    from harness.prep import plan_packs
    from harness.records import Pack

_HOMES = {
    "HarnessError": "harness.errors",
    "Loader": "harness.loader",
    "LoaderConfig": "harness.loader",
    "Pack": "harness.records",
    "open_dataset": "harness.formats",
    "open_writer": "harness.formats",
    "plan_packs": "harness.prep.packing",
}

__all__ = ["HarnessError", "Loader", "LoaderConfig", "Pack", "open_dataset", "open_writer", "plan_packs"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
