"""TODO."""

from __future__ import annotations

from harness.launch.preflight.probe import code_digest

__all__ = [
    "code_digest",
]
