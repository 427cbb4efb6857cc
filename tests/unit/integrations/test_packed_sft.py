"""Code written to the RFC's names reads any format, in workers too, and wrong calls are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from harness.errors import ConfigError
from harness.formats import open_dataset, open_writer
from harness.integrations import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedParquetDataset,
    create_sft_dataset,
    open_packed_writer,
)
from harness.integrations.packed_sft import PACKED_STORAGE, GPTSFTDataset
from harness.records import Pack

PACKS = [Pack(np.arange(6) + 10 * number, [1, 1, 0, 1, 1, 0], [0, 3] if number % 2 else [0]) for number in range(9)]
CLASSES = {"npy": GPTSFTPackedDataset, "parquet": GPTSFTPackedParquetDataset, "memmap": GPTSFTPackedMemmapDataset}


def write(path: Path, storage: str) -> Path:
    with open_packed_writer(path, packed_storage=storage, pack_size=8) as writer:
        for pack in PACKS:
            writer.append(pack)
    return path


def plain(item):
    return {name: list(map(int, values)) for name, values in item.items()}


EXPECTED = [
    {
        "input_ids": pack.input_ids.tolist(),
        "loss_mask": pack.loss_mask.tolist(),
        "seq_boundaries": [*pack.seq_start_id.tolist(), len(pack)],
    }
    for pack in PACKS
]


@pytest.mark.parametrize("storage", PACKED_STORAGE)
def test_every_storage_has_its_class_and_the_items_of_bridge(tmp_path, storage):
    path = write(tmp_path / "data", storage)
    dataset = create_sft_dataset(path, seq_length=8)
    assert open_dataset(path).format == PACKED_STORAGE[storage]
    assert type(dataset) is CLASSES.get(PACKED_STORAGE[storage], GPTSFTDataset)
    assert [plain(dataset[index]) for index in range(len(dataset))] == EXPECTED
    assert type(dataset)(path, None, 8).reader.fingerprint == dataset.reader.fingerprint


def test_it_works_in_persistent_workers(tmp_path):
    dataset = create_sft_dataset(write(tmp_path / "data", "parquet"))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True, collate_fn=list)
    for _ in range(2):
        assert [plain(item) for batch in loader for item in batch] == EXPECTED


def test_a_negative_index_has_no_loss(tmp_path):
    dataset = create_sft_dataset(write(tmp_path / "data", "memmap"))
    assert plain(dataset[-1]) == {**EXPECTED[-1], "loss_mask": [0] * 6}
    for index in (9, -10):
        with pytest.raises(IndexError, match=f"pack {index} of 9"):
            dataset[index]


class SmallTokenizer:
    vocab_size = 5


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    path = write(tmp_path / "data", "memmap")
    with pytest.raises(ConfigError, match="the dataset's format is memmap") as error:
        GPTSFTPackedParquetDataset(path)
    assert "GPTSFTPackedMemmapDataset" in error.value.fix
    with pytest.raises(ConfigError, match="above the seq_length of 4"):
        create_sft_dataset(path, seq_length=4)
    with pytest.raises(ConfigError, match="'pickle' is not known"):
        open_packed_writer(tmp_path / "out", packed_storage="pickle", pack_size=8)


def test_a_tokenizer_without_the_datasets_tokens_is_refused(tmp_path):
    from harness.formats import Provenance

    with open_writer(tmp_path / "data", pack_size=8, provenance=Provenance(counts={"vocab_size": 300})) as writer:
        writer.append(PACKS[0])
    with pytest.raises(ConfigError, match="the tokenizer has 5 tokens, but the dataset was prepared with 300"):
        create_sft_dataset(tmp_path / "data", SmallTokenizer())
