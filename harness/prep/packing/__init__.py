"""Packing: plan which sequences share a pack, from their lengths alone.

    plan = plan_packs([700, 3000, 90, 4000], pack_size=4096)
    plan.pack(0)                                    # indices of the sequences in pack 0

`plan_packs` plans stored data all at once; `StreamPacker` packs a stream whose next sequence is not known yet.
"""

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
