"""Packed SFT data for Megatron-Core: stored in any format, fed to training, and proven to be the same.

The public names load on first use, so that `import harness` needs no more than Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.errors import HarnessError
    from harness.formats import convert_dataset, open_dataset, open_writer
    from harness.loader import Loader, LoaderConfig
    from harness.prep import plan_packs, prepare
    from harness.records import Pack

__all__ = [
    "HarnessError",
    "Loader",
    "LoaderConfig",
    "Pack",
    "convert_dataset",
    "open_dataset",
    "open_writer",
    "plan_packs",
    "prepare",
]

__getattr__ = names_on_first_use(
    __name__,
    errors="HarnessError",
    formats="convert_dataset open_dataset open_writer",
    loader="Loader LoaderConfig",
    prep="plan_packs prepare",
    records="Pack",
)
