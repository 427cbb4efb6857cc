"""Packed files for the reader of Megatron-Bridge 0.6, with the figures of packing that it reads.

The files lie in the folder `packed` of its dataset root, and `SIZE_metadata.jsonl` beside them: a JSON list of one
record of figures for each file. Bridge looks for its own files under a name with a hash of its settings, so that the
settings that are printed name these. A sequence of L stored tokens counts as L - 1 there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from harness.checks import CheckedSettings, one_of
from harness.errors import ConfigError
from harness.formats.convert import convert_dataset
from harness.formats.inspect import find_tokenizer_folder
from harness.formats.manifest import Manifest
from harness.formats.opening import open_dataset
from harness.formats.reader import PackReader, require_plain
from harness.settings import load
from harness.storage import is_uri, write_atomically
from harness.storage.files import explain_os_errors

BRIDGE = "megatron_bridge"
_SPLITS = ("training", "validation")
_SUFFIXES = {"parquet": ".idx.parquet", "npy": ".npy"}


@dataclass
class BridgeFiles(CheckedSettings, section="bridge"):
    """Names of the files for Megatron-Bridge.

    Attributes:
        split: training or validation.
        file_format: parquet, or npy, which Bridge loads completely and has deprecated.
    """

    split: str = one_of("training", _SPLITS)
    file_format: str = one_of("parquet", _SUFFIXES)


@dataclass(frozen=True)
class BridgeExport:
    """Files that were written for Megatron-Bridge.

    Attributes:
        settings: Python text of the dataset's settings, for a recipe of Bridge.
        end_token: id of the token that ends a sequence in the dataset's own tokenizer; None if that is not at hand.
        num_untrained: labels that Bridge leaves out of the loss although the dataset trains them: it never trains the
            label after `end_token`.
    """

    manifest: Manifest
    path: str
    metadata_path: str
    settings: str
    end_token: int | None
    num_untrained: int


def export_to_bridge(
    source: str | PathLike[str],
    root: str | PathLike[str],
    *,
    files: BridgeFiles | None = None,
    pack_size: int | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> BridgeExport:
    """Write a dataset as one file of packs for Megatron-Bridge, and read it back.

    Args:
        root: folder that Bridge's configuration names as dataset_root.
        files: names; None for the defaults of BridgeFiles. Other arguments are those of `convert_dataset`.

    Raises:
        ConfigError: `root` is in object storage.
        FormatError: as for `convert_dataset`, or the figures of another split cannot be read.
    """
    files = files or BridgeFiles()
    if is_uri(str(root)):
        what = "the files for Megatron-Bridge cannot be written to object storage"
        raise ConfigError(what, where=str(root), fix="write them to a local folder, then upload it")
    with closing(open_dataset(source)) as reader:
        require_plain(reader, "Megatron-Bridge's loss")
        size = reader.pack_size if pack_size is None else pack_size
        folder = Path(root) / "packed"
        path = folder / f"{files.split}_{size}{_SUFFIXES[files.file_format]}"
        metadata_path = folder / f"{size}_metadata.jsonl"
        others: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            what = "the packing metadata is damaged"
            others = load(
                list[dict[str, Any]], metadata_path.read_bytes(), where=metadata_path, fix="remove it", what=what
            )
        others = [figures for figures in others if figures.get("split") != files.split]
        manifest = convert_dataset(
            source, path, format=files.file_format, pack_size=size, overwrite=overwrite, progress=progress
        )
        with explain_os_errors(str(metadata_path)):
            write_atomically(metadata_path, json.dumps([*others, _figures(reader, size, files.split)]).encode())
        end_token, num_untrained = _end_token(reader), 0
        for pack in reader if end_token is not None else ():
            num_untrained += int(np.count_nonzero((pack.input_ids == end_token) & (pack.loss_mask == 1)))
        return BridgeExport(
            manifest=manifest,
            path=str(path),
            metadata_path=str(metadata_path),
            settings=_settings(root, size, metadata_path),
            end_token=end_token,
            num_untrained=num_untrained,
        )


def _figures(reader: PackReader, pack_size: int, split: str) -> dict[str, Any]:
    """Return the record of a file; Bridge reads the maxima and the minimum where it pads the bounds of sequences."""
    lengths = reader.sequence_lengths.astype(np.int64) - 1
    of_packs = np.add.reduceat(lengths, reader.pack_offsets[:-1])
    return {
        "dataset_max_seqlen": int(lengths.max()),
        "max_samples_per_bin": int(np.diff(reader.pack_offsets).max()),
        "packing_factor": round(lengths.shape[0] / len(reader), 2),
        "packing_efficiency": round(100 * float(of_packs.mean()) / pack_size, 2),
        "pack_size": pack_size,
        "min_packed_seqlen": int(of_packs.min()),
        "split": split,
    }


def _settings(root: str | PathLike[str], pack_size: int, metadata_path: Path) -> str:
    specs = f"packed_sequence_size={pack_size}"
    has_validation = False
    for split, setting in (("training", "packed_train_data_path"), ("validation", "packed_val_data_path")):
        paths = (metadata_path.parent / f"{split}_{pack_size}{suffix}" for suffix in _SUFFIXES.values())
        if path := next((path for path in paths if path.exists()), None):
            specs += f", {setting}={str(path)!r}"
            has_validation = split == "validation"
    return (
        f"GPTSFTDatasetConfig(dataset_root={str(root)!r}, seq_length={pack_size}, do_validation={has_validation}, "
        f"do_test=False, enable_offline_packing=True, offline_packing_specs=PackedSequenceSpecs({specs}, "
        f"packed_metadata_path={str(metadata_path)!r}))"
    )


def _end_token(reader: PackReader) -> int | None:
    """Return the id of the token that ends a sequence, from the files of the dataset's tokenizer; None without them."""
    try:
        folder = find_tokenizer_folder(reader)
        name = json.loads((folder / "tokenizer_config.json").read_bytes())["eos_token"]
        name = name["content"] if isinstance(name, dict) else name
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
        known = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
        return int(known[name] if name in known else tokenizer["model"]["vocab"][name])
    except (ConfigError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
