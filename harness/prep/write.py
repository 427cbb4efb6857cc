"""From a plan and stored sequences to a dataset folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.formats import Provenance, open_dataset, open_writer
from harness.formats.virtual import NAME as VIRTUAL
from harness.prep.engines import Split
from harness.prep.packing import PackPlan


def write_packs(
    path: Path,
    plan: PackPlan,
    split: Split,
    *,
    format: str,
    pack_size: int,
    provenance: Provenance,
    advance: Callable[[float], None],
    store: Path,
) -> str:
    """Stream the packs of a plan into a new dataset.

    Args:
        path: the dataset's folder.
        plan: numbers of sequences in `split`.
        split: the sequences.
        format: a name in `harness.formats.FORMATS`.
        pack_size: tokens that no pack exceeds.
        provenance: stored in the manifest.
        advance: called with a number of packs as they are written.
        store: where the format `virtual` keeps the sequences.

    Returns:
        the dataset's fingerprint.

    Raises:
        FormatError: the dataset cannot be written.
    """
    if format == VIRTUAL:
        return _write_virtual(path, plan, split, pack_size, provenance, advance, store)
    with open_writer(path, format=format, pack_size=pack_size, provenance=provenance) as writer:
        for index in range(plan.num_packs):
            writer.append(split.pack(plan.pack(index)))
            if index % 64 == 63:
                advance(64)
        advance(plan.num_packs % 64)
    assert writer.manifest is not None
    return writer.manifest.fingerprint


def _write_virtual(
    path: Path,
    plan: PackPlan,
    split: Split,
    pack_size: int,
    provenance: Provenance,
    advance: Callable[[float], None],
    store: Path,
) -> str:
    """Store the sequences in their own order, one a pack, and beside them the plan."""
    from harness.formats import open_store, write_plan

    store.parent.mkdir(exist_ok=True)
    # The tokenizer is named from the dataset's folder.
    tokenizer = Path(os.path.relpath(path / provenance.tokenizer, store)).as_posix()
    stored = replace(provenance, packer="", seed=None, tokenizer=tokenizer)
    # In packs, so that a bar that knows packs moves evenly.
    share = plan.num_packs / len(split)
    with open_writer(store, format=VIRTUAL, pack_size=pack_size, provenance=stored) as writer:
        for number in range(len(split)):
            writer.append(split.pack(np.array([number])))
            if number % 256 == 255:
                advance(256 * share)
    write_plan(
        path,
        open_store(store),
        pack_offsets=plan.pack_offsets,
        sequence_ids=plan.sequence_ids,
        pack_size=pack_size,
        packer=provenance.packer,
        seed=provenance.seed or 0,
    )
    reader = open_dataset(path)
    try:
        return reader.fingerprint
    finally:
        reader.close()
