"""TODO."""

from __future__ import annotations

from harness.prep.packing.plan import MIN_SEQUENCE_TOKENS, PACKED_STORAGE, PACKERS, PackingConfig, PackPlan, plan_packs
from harness.prep.packing.stream import Member, StreamPacker, pack_of

__all__ = [
    "MIN_SEQUENCE_TOKENS",
    "PACKED_STORAGE",
    "PACKERS",
    "Member",
    "PackPlan",
    "PackingConfig",
    "StreamPacker",
    "pack_of",
    "plan_packs",
]
