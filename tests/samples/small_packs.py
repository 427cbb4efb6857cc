"""Small datasets: some packs for tests of formats, and packs with a pattern that a model can learn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from harness.formats import Provenance, open_writer
from harness.loader import RankBatch
from harness.records import Pack

VOCAB = 300
# Seven packs of two sequences, which differ in their first token.
PACKS = [Pack([number, 2, 3, 4], [1, 0, 1, 0], [0, 2]) for number in range(1, 8)]
P = TypeVar("P", str, Path)
# A model that trains a step in a few hundredths of a second.
TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=4"),
    "model.num_query_groups=2",
)


def batch_digest(batch: RankBatch) -> str:
    """Return 32 hexadecimal digits over tokens, labels, masks, positions and boundaries of the rows, in order."""
    digest = xxhash.xxh3_128()
    for row in batch.rows:
        digest.update(np.asarray([len(row), row.num_sequences], dtype=np.int64).tobytes())
        arrays = (row.tokens, row.labels, row.loss_mask, row.position_ids, row.cu_seqlens, row.cu_seqlens_padded)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        if (media := row.media) is not None:
            for values in (media.sequences, media.starts, media.tokens, media.digests):
                digest.update(values.tobytes())
    return str(digest.hexdigest())


def write_packs(path: P, packs: Iterable[Pack], **settings: Any) -> P:
    """Write a dataset with the settings of `open_writer`; return its path."""
    with open_writer(path, **settings) as writer:
        for pack in packs:
            writer.append(pack)
    return path


def write_small_packs(folder: Path, *, num_packs: int = 40, is_weighted: bool = False) -> Path:
    """Write `train`, 40 packs of up to 256 tokens, and `validation`, 5 of them; an epoch of 6 a step ends short.

    Weighted tokens are those that are trained otherwise, with weights from 0.01 to 1.
    """
    rng = np.random.default_rng(0)
    for split, count in (("train", num_packs), ("validation", 5)):
        provenance = Provenance(tokenizer="none", tokenizer_hash="0" * 16, counts={"vocab_size": VOCAB})
        if is_weighted:
            provenance = replace(provenance, mask={"weights": "hundredths"})
        with open_writer(folder / split, format="parquet", pack_size=256, provenance=provenance) as writer:
            for _ in range(count):
                lengths = rng.integers(5, 80, size=rng.integers(1, 4))
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
                ids = np.concatenate([(rng.integers(0, 290) + np.arange(n) % 7) for n in lengths])
                mask = rng.integers(0, 4, size=ids.shape[0]) > 0
                mask[starts[1:] - 1] = False
                mask[-1] = False
                if is_weighted:
                    mask = mask * np.random.default_rng(len(ids)).integers(1, 101, size=len(ids))
                writer.append(Pack(ids, mask, starts))
    return folder
