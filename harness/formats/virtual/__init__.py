"""TODO."""

from __future__ import annotations

from harness.formats.virtual.plan import open_store, write_plan
from harness.formats.virtual.store import NAME

__all__ = [
    "NAME",
    "open_store",
    "write_plan",
]
