"""A store of sequences, and plans: datasets that hold which of its sequences make a pack."""

from __future__ import annotations

from harness.formats.virtual.plan import SequenceStore, open_store, write_plan
from harness.formats.virtual.store import NAME

__all__ = [
    "NAME",
    "SequenceStore",
    "open_store",
    "write_plan",
]
