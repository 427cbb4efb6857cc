"""Packed SFT data for Megatron-Core: stored in any format, fed to training, and proven to be the same.

These names keep their meaning within a major version. They load on first use, so that `import harness` needs no more
than Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.errors import HarnessError
    from harness.formats import convert_dataset, open_dataset, open_writer, verify_dataset
    from harness.loader import Loader, LoaderConfig
    from harness.prep import plan_packs, prepare
    from harness.records import Pack, SequenceView
    from harness.thd import build_thd_batch

__all__ = [
    "HarnessError",
    "Loader",
    "LoaderConfig",
    "Pack",
    "SequenceView",
    "build_thd_batch",
    "convert_dataset",
    "open_dataset",
    "open_writer",
    "plan_packs",
    "prepare",
    "verify_dataset",
]

__getattr__ = names_on_first_use(
    __name__,
    errors="HarnessError",
    formats="convert_dataset open_dataset open_writer verify_dataset",
    loader="Loader LoaderConfig",
    prep="plan_packs prepare",
    records="Pack SequenceView",
    thd="build_thd_batch",
)
