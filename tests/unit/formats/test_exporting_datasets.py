"""Files of packs for Megatron-Bridge, under its names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_packs import write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import Provenance, open_dataset
from harness.formats.foreign import BridgeFiles, export_to_bridge, export_to_swift, import_dataset
from harness.records import Pack

# Two sequences of 4 and 3 tokens, and one of 5; token 9 ends a sequence.
PACKS = [Pack([1, 9, 3, 9, 4, 5, 9], [0, 1, 1, 0, 1, 1, 0], [0, 4]), Pack([6, 7, 8, 8, 9], [0, 0, 1, 1, 0], [0])]


def write(folder: Path, packs: list[Pack] = PACKS) -> Path:
    write_packs(folder / "train", packs, pack_size=8, provenance=Provenance(tokenizer="../tokenizer"))
    return folder / "train"


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = {"added_tokens": [{"id": 9, "content": "</s>"}], "model": {"vocab": {}}}
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))


def test_the_files_have_the_names_and_figures_that_bridge_looks_for_and_are_imported_again(tmp_path: Path) -> None:
    written = export_to_bridge(write(tmp_path), tmp_path / "root", files=BridgeFiles(file_format="npy"))

    folder = tmp_path / "root/packed"
    assert written.path == str(folder / "training_8.npy")
    assert sorted(path.name for path in folder.iterdir()) == ["8_metadata.jsonl", "training_8.npy"]
    assert f"packed_train_data_path='{written.path}'" in written.settings
    assert f"packed_metadata_path='{written.metadata_path}'" in written.settings
    assert "do_validation=False" in written.settings
    assert written.end_token is None
    # Lists of Python numbers; the figures count the tokens that are inputs.
    assert np.load(written.path, allow_pickle=True).tolist() == [
        {"input_ids": [1, 9, 3, 9, 4, 5, 9], "loss_mask": [0, 1, 1, 0, 1, 1, 0], "seq_start_id": [0, 4]},
        {"input_ids": [6, 7, 8, 8, 9], "loss_mask": [0, 0, 1, 1, 0], "seq_start_id": [0]},
    ]
    assert json.loads(Path(written.metadata_path).read_text()) == [
        {
            "dataset_max_seqlen": 4,
            "max_samples_per_bin": 2,
            "packing_factor": 1.5,
            "packing_efficiency": 56.25,
            "pack_size": 8,
            "min_packed_seqlen": 4,
            "split": "training",
        }
    ]
    manifest = import_dataset(written.path, tmp_path / "again", convention="megatron_bridge", pack_size=8)
    assert manifest.fingerprint == open_dataset(tmp_path / "train").fingerprint
    other = export_to_bridge(tmp_path / "train", tmp_path / "root")
    assert Path(other.path).name == "training_8.idx.parquet"
    assert f"packed_train_data_path='{other.path}'" in other.settings
    assert list(open_dataset(other.path)) == PACKS


def test_a_validation_split_adds_its_figures_and_a_second_export_replaces_its_own(tmp_path: Path) -> None:
    source, validation = write(tmp_path), write(tmp_path / "other", PACKS[1:])
    export_to_bridge(source, tmp_path / "root")
    written = export_to_bridge(validation, tmp_path / "root", files=BridgeFiles(split="validation"))
    export_to_bridge(source, tmp_path / "root", overwrite=True)

    figures = json.loads(Path(written.metadata_path).read_text())
    assert sorted((one["split"], one["max_samples_per_bin"]) for one in figures) == [("training", 2), ("validation", 1)]
    assert Path(written.path).name == "validation_8.idx.parquet"
    assert "do_validation=True" in written.settings
    assert f"packed_val_data_path='{written.path}'" in written.settings


def test_labels_after_the_token_that_ends_a_sequence_are_counted_because_bridge_does_not_train_them(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    written = export_to_bridge(write(tmp_path), tmp_path / "root")

    assert (written.end_token, written.num_untrained) == (9, 1)


def test_a_cached_dataset_of_ms_swift_has_a_row_of_tokens_and_weights_for_each_sequence(tmp_path: Path) -> None:
    written = export_to_swift(write(tmp_path), tmp_path / "cache")

    datasets = pytest.importorskip("datasets")
    stored = datasets.load_from_disk(str(tmp_path / "cache"))
    # The last sequence of a pack is listed with the room that is left: packs of 7 and 5 tokens fill 8 each.
    assert stored["lengths"][:] == [[4], [4], [8]]
    contents = [message["content"] for messages in stored["messages"] for message in messages]
    assert contents == [
        {"token_ids": [1, 9, 3, 9], "loss_scale": [0, 0, 1, 1]},
        {"token_ids": [4, 5, 9], "loss_scale": [0, 1, 1]},
        {"token_ids": [6, 7, 8, 8, 9], "loss_scale": [0, 0, 0, 1, 1]},
    ]
    assert "--packing_strategy sequential --packing_length 8" in written.arguments
    assert (written.num_packs, written.num_sequences) == (2, 3)


def test_a_cached_dataset_of_ms_swift_is_refused_where_it_cannot_be_written_or_imported(tmp_path: Path) -> None:
    source = write(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written to object storage"):
        export_to_swift(source, "s3://bucket/root")
    with pytest.raises(FormatError, match="a pack has 7 tokens, more than the 6 of"):
        export_to_swift(source, tmp_path / "small", pack_size=6)
    write_packs(tmp_path / "lasts", [Pack([1, 2], [0, 1], [0])], pack_size=8)
    with pytest.raises(FormatError, match="trains position 1, the last of its sequence"):
        export_to_swift(tmp_path / "lasts", tmp_path / "other")
    assert not (tmp_path / "other/state.json").exists()

    export_to_swift(source, tmp_path / "cache")
    with pytest.raises(FormatError, match="the folder is not empty"):
        export_to_swift(source, tmp_path / "cache")
    export_to_swift(source, tmp_path / "cache", overwrite=True)
    with pytest.raises(FormatError, match="stores chats, which it renders and packs during training"):
        import_dataset(tmp_path / "cache", tmp_path / "again", convention="ms_swift")


def test_a_bucket_and_damaged_figures_of_another_split_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to object storage"):
        export_to_bridge(write(tmp_path / "other"), "s3://bucket/root")
    folder = tmp_path / "root/packed"
    folder.mkdir(parents=True)
    (folder / "8_metadata.jsonl").write_text('[{"split": ')

    with pytest.raises(FormatError, match="packing metadata is damaged"):
        export_to_bridge(write(tmp_path), tmp_path / "root")
    assert not (folder / "training_8.idx.parquet").exists()


@pytest.mark.parametrize("root", ["file/root", "x" * 300])
def test_a_root_that_cannot_be_is_refused_by_its_name(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError) as caught:
        export_to_bridge(write(tmp_path), tmp_path / root)
    assert root in caught.value.where
