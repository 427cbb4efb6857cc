"""Planning packs again over sequences that are stored once: another pack size or seed, and no token is copied."""

from __future__ import annotations

from harness.formats import Manifest, open_store, write_plan
from harness.prep.packing import plan_packs


def repack_store(
    store: str,
    destination: str,
    *,
    pack_size: int,
    algorithm: str = "best_fit_decreasing",
    seed: int = 0,
    overwrite: bool = False,
) -> Manifest:
    """Write a dataset whose packs are planned over a sequence store, or over that of another plan.

    Args:
        store: a dataset in the format `virtual`.
        destination: a new or empty folder. It names the store by its path from there.
        pack_size, algorithm, seed: as for `plan_packs`.
        overwrite: replace a dataset that is there.

    Returns:
        the manifest. It has no fingerprint; `open_dataset(destination).fingerprint` reads all packs for it once.

    Raises:
        FormatError: there is no store, or the destination cannot be written.
        PrepError: a sequence is longer than a pack.
        ConfigError: a setting is not usable.
    """
    found = open_store(store)
    plan = plan_packs(found.lengths, pack_size=pack_size, algorithm=algorithm, seed=seed)
    return write_plan(
        destination,
        found,
        pack_offsets=plan.pack_offsets,
        sequence_ids=plan.sequence_ids,
        pack_size=pack_size,
        packer=algorithm,
        seed=seed,
        overwrite=overwrite,
    )
