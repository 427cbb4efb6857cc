"""TODO."""

from __future__ import annotations

from harness.prep.pydoc.source import write_pydoc_corpus

__all__ = [
    "write_pydoc_corpus",
]
