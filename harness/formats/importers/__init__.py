"""Import of packed data that other tools wrote. `datasets` has the conventions, `rows` converts one row of each."""

from __future__ import annotations

from harness.formats.importers.datasets import CONVENTIONS, import_dataset

__all__ = ["CONVENTIONS", "import_dataset"]
