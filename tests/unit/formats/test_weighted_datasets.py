"""Weights of tokens are stored by every format that has a mask, and refused by whatever would take them for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_packs import write_packs

from harness import LoaderConfig, Pack, open_dataset
from harness.config import compose_config
from harness.errors import ConfigError, FormatError, HarnessError
from harness.formats import Provenance, convert_dataset, repair_manifest, verify_dataset
from harness.formats.foreign import export_to_bridge
from harness.formats.inspect import inspect_dataset
from harness.integrations import RankStream
from harness.integrations.packed_sft import create_sft_dataset
from harness.integrations.torch import StoredRows
from harness.loader import DataConfig, JoinedReader, open_datasets
from harness.loader.datasets import open_live
from harness.plan import SftConfig

FORMATS = ("npy", "parquet", "memmap", "binidx", "virtual")
WEIGHTED = Provenance(mask={"weights": "hundredths"})
PACKS = [Pack([1, 2, 3, 4, 5], [100, 1, 0, 29, 0], [0, 3]), Pack([6, 7], [50, 0], [0])]
PLAIN = [Pack([1, 2, 3], [1, 1, 0], [0])]


def write(path: Path, packs: list[Pack] = PACKS, provenance: Provenance = WEIGHTED, **settings: Any) -> Path:
    return write_packs(path, packs, pack_size=5, provenance=provenance, **settings)


@pytest.mark.parametrize("format", FORMATS)
def test_a_dataset_with_weights_is_read_and_converted_as_it_was_written(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "first", format=format)

    reader = open_dataset(path)

    assert reader.max_weight == 100
    assert [*reader] == PACKS
    assert inspect_dataset(str(path))["trained_tokens"] == 4
    for other in FORMATS:
        convert_dataset(path, tmp_path / other, format=other)
        assert open_dataset(tmp_path / other).fingerprint == reader.fingerprint
        assert verify_dataset(tmp_path / other) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_repaired_dataset_with_weights_still_has_them(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / "data", format=format)
    (path / "manifest.json").unlink()

    assert repair_manifest(str(path))[1] == []

    assert open_dataset(path).max_weight == 100
    assert verify_dataset(path) == []


@pytest.mark.parametrize(
    ("mask", "provenance", "message"),
    [
        ([1, 50, 0], Provenance(), "pack 0 has loss_mask 50 at position 1, expected 0 or 1"),
        ([1, 101, 0], WEIGHTED, "pack 0 has loss_mask 101 at position 1, expected 0 to 100"),
    ],
)
def test_a_weight_that_the_dataset_cannot_have_is_refused(tmp_path, mask, provenance, message) -> None:
    with pytest.raises(FormatError, match=message):
        write(tmp_path / "data", [Pack([1, 2, 3], mask, [0])], provenance)


def test_masks_of_a_blend_are_scaled_to_the_weights_of_its_other_datasets(tmp_path: Path) -> None:
    plain, weighted = write(tmp_path / "plain", PLAIN, Provenance()), write(tmp_path / "weighted")

    joined = JoinedReader([open_dataset(plain), open_dataset(weighted)])

    assert joined.max_weight == 100
    assert [pack.loss_mask.tolist() for pack in joined.read([2, 0, 1])] == [[50, 0], [100, 100, 0], [100, 1, 0, 29, 0]]
    assert JoinedReader([open_dataset(plain)] * 2).read([1]) == PLAIN


def live(path: Path) -> None:
    open_live(compose_config("sft", SftConfig, ["data.live.path=chunks", *_WEIGHTED_LIVE]).data)


_WEIGHTED_LIVE = ("data.live.tokenizer.train_on=weighted",)
USERS = {
    "jsonl": lambda path: convert_dataset(path, path.with_name("out"), format="jsonl"),
    "npy file": lambda path: convert_dataset(path, path.with_name("out.npy"), format="npy"),
    "bridge": lambda path: export_to_bridge(path, path.with_name("out")),
    "stream": lambda path: RankStream(path, LoaderConfig(global_batch_size=1)),
    "stream of a run": lambda path: RankStream(
        open_datasets(DataConfig(path=str(path))), LoaderConfig(global_batch_size=1)
    ),
    "rows": lambda path: StoredRows(path, dialect="megatron"),
    "packed_sft": create_sft_dataset,
    "live": live,
}


@pytest.mark.parametrize("user", USERS)
def test_what_would_take_weights_for_a_mask_refuses_them_by_name(tmp_path: Path, user: str) -> None:
    path = write(tmp_path / "data")
    with pytest.raises(HarnessError, match=r"weights of tokens|token weights"):
        USERS[user](path)


def test_a_global_batch_whose_weights_exceed_int32_is_refused(tmp_path: Path) -> None:
    from harness.megatron.run.fine_tuning import open_fine_tuning  # imports Megatron-Core

    path = write(tmp_path / "data")
    settings = [f"data.path={path}", "trainer.device=cpu", "model.vocab_size=300"]
    config = compose_config("sft", SftConfig, [*settings, "loader.global_batch_size=4294968"])
    with pytest.raises(
        ConfigError, match="global batch of 4,294,968 packs of 5 tokens with weights is too large"
    ) as it:
        open_fine_tuning(config, None)  # type: ignore[arg-type]
    assert it.value.fix.startswith("set it to at most 4,294,967,")
