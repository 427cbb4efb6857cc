"""Write a plan and its sequences as a dataset: new ones, or another plan over sequences that are already stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.formats import Manifest, Provenance, open_dataset, open_store, open_writer, write_plan
from harness.prep.packing import PackPlan, plan_packs
from harness.prep.spool import Split


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
        plan: refers to sequences by their number in `split`.
        split: the sequences.
        format: a name in `harness.formats.FORMATS`.
        pack_size: maximum number of tokens in a pack.
        provenance: stored in the manifest.
        advance: called with a number of packs as they are written.
        store: where the format `virtual` keeps the sequences.

    Returns:
        the dataset's fingerprint.

    Raises:
        FormatError: the dataset cannot be written.
    """
    if format != "virtual":
        with open_writer(path, format=format, pack_size=pack_size, provenance=provenance) as writer:
            for index in range(plan.num_packs):
                writer.append(split.pack(plan.pack(index)))
                if index % 64 == 63:
                    advance(64)
            advance(plan.num_packs % 64)
        assert writer.manifest is not None
        return writer.manifest.fingerprint
    # The sequences in their own order, one per pack, and the plan beside them. The tokenizer's path is relative.
    store.parent.mkdir(exist_ok=True)
    tokenizer = Path(os.path.relpath(path / provenance.tokenizer, store)).as_posix()
    stored = replace(provenance, packer="", seed=None, tokenizer=tokenizer)
    with open_writer(store, format=format, pack_size=pack_size, provenance=stored) as writer:
        for number in range(len(split)):
            writer.append(split.pack(np.array([number])))
            if number % 256 == 255:
                advance(256 * plan.num_packs / len(split))
    write_plan(
        path,
        open_store(store),
        pack_offsets=plan.pack_offsets,
        sequence_ids=plan.sequence_ids,
        pack_size=pack_size,
        packer=provenance.packer,
        seed=provenance.seed or 0,
    )
    with closing(open_dataset(path)) as reader:
        return reader.fingerprint


def repack_store(
    store: str,
    destination: str,
    *,
    pack_size: int,
    algorithm: str = "best_fit_decreasing",
    seed: int = 0,
    overwrite: bool = False,
) -> Manifest:
    """Write a dataset with other packs over the sequences of a store, or of another plan; no token is copied.

    Args:
        store: a dataset in the format `virtual`.
        destination: a new or empty folder, which will refer to the store by relative path.
        pack_size, algorithm, seed: as for `plan_packs`.
        overwrite: replace an existing dataset.

    Returns:
        the manifest. It has no fingerprint; `open_dataset(destination).fingerprint` reads all packs once to compute it.

    Raises:
        FormatError: there is no store, or the destination cannot be written.
        PrepError: a sequence is longer than a pack.
        ConfigError: a setting is invalid.
    """
    sequences = open_store(store)
    plan = plan_packs(sequences.lengths, pack_size=pack_size, algorithm=algorithm, seed=seed)
    return write_plan(
        destination,
        sequences,
        pack_offsets=plan.pack_offsets,
        sequence_ids=plan.sequence_ids,
        pack_size=pack_size,
        packer=algorithm,
        seed=seed,
        overwrite=overwrite,
    )
