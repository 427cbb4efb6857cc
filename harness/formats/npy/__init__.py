"""`npy`: the legacy format, a pickled list of dicts of Python lists, read without running any code."""

from __future__ import annotations

from harness.formats.npy.shard import FORMAT

__all__ = ["FORMAT"]
