"""Import of packed data that other tools wrote."""

from __future__ import annotations

from harness.formats.importers.datasets import CONVENTIONS, import_dataset

__all__ = [
    "CONVENTIONS",
    "import_dataset",
]
