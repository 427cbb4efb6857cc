"""From a plan and stored sequences to a dataset folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.formats import Manifest, Provenance, open_writer
from harness.prep.packing import PackPlan
from harness.prep.spool import Spool


def write_packs(
    path: Path,
    plan: PackPlan,
    spool: Spool,
    *,
    format: str,
    pack_size: int,
    provenance: Provenance,
    advance: Callable[[int], None],
) -> Manifest:
    """Stream the packs of a plan into a new dataset.

    Args:
        path: the dataset's folder.
        plan: ids of sequences in `spool`.
        spool: the sequences.
        format: a name in `harness.formats.FORMATS`.
        pack_size: tokens that no pack exceeds.
        provenance: stored in the manifest.
        advance: called with a number of packs as they are written.

    Returns:
        the dataset's manifest.

    Raises:
        FormatError: the dataset cannot be written.
    """
    with open_writer(path, format=format, pack_size=pack_size, provenance=provenance) as writer:
        for index in range(plan.num_packs):
            writer.append(spool.pack(plan.pack(index)))
            if index % 64 == 63:
                advance(64)
        advance(plan.num_packs % 64)
    assert writer.manifest is not None
    return writer.manifest
