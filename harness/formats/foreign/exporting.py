"""Datasets as the files of two other trainers.

Megatron-Bridge 0.6 reads files of packs in the folder `packed` of its dataset root, and `SIZE_metadata.jsonl` beside
them: a JSON list of one record of figures for each file. It looks for its own files under a name with a hash of its
settings, so that the settings that are printed name these. A sequence of L stored tokens counts as L - 1 there.

ms-swift 4.6 stores rows of `messages` and `lengths` as a cached dataset, packs by the lengths, and renders a row in
every step. A message can be a list of tokens with a weight each, which a template without any text of its own leaves as
they are: it is written as a plugin. The last sequence of a pack is listed with the room that is left in it, so that the
packing strategy `sequential` makes the stored packs again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.checks import CheckedSettings, one_of
from harness.errors import ConfigError, FormatError
from harness.formats.convert import convert_dataset
from harness.formats.inspect import find_tokenizer_folder
from harness.formats.layouts.jsonl import IGNORED_LABEL, labels_of_pack
from harness.formats.manifest import Manifest
from harness.formats.opening import open_dataset
from harness.formats.reader import PackReader, require_plain
from harness.records import Pack
from harness.settings import load
from harness.storage import is_uri, write_atomically
from harness.storage.files import explain_os_errors

BRIDGE = "megatron_bridge"
_SPLITS = ("training", "validation")
_SUFFIXES = {"parquet": ".idx.parquet", "npy": ".npy"}

SWIFT = "ms_swift"
TEMPLATE = "harness"
_DATA, _STATE, _PLUGIN = "data-00000-of-00001.arrow", "state.json", "template.py"
_TOKENS = pa.struct([("token_ids", pa.list_(pa.int32())), ("loss_scale", pa.list_(pa.uint8()))])
_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", _TOKENS)]))),
        ("lengths", pa.list_(pa.int64())),
    ]
)
_BATCH = 256
_TEMPLATE = f'''"""A template of ms-swift that adds nothing to messages of tokens."""

from swift.template import TemplateMeta, register_template

register_template(TemplateMeta({TEMPLATE!r}, prefix=[], prompt=["{{{{QUERY}}}}"], chat_sep=None, suffix=[]))
'''


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
    with closing(_open_plain(source, root, "Megatron-Bridge")) as reader:
        size = reader.pack_size if pack_size is None else pack_size
        folder = Path(root) / "packed"
        path = folder / f"{files.split}_{size}{_SUFFIXES[files.file_format]}"
        metadata_path = folder / f"{size}_metadata.jsonl"
        others: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            damaged: Any = {"where": metadata_path, "fix": "remove it", "what": "the packing metadata is damaged"}
            others = load(list[dict[str, Any]], metadata_path.read_bytes(), **damaged)
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


def _open_plain(source: str | PathLike[str], folder: str | PathLike[str], trainer: str) -> PackReader:
    if is_uri(str(folder)):
        what = f"the files for {trainer} cannot be written to object storage"
        raise ConfigError(what, where=str(folder), fix="write them to a local folder, then upload it")
    reader = open_dataset(source)
    require_plain(reader, f"{trainer}'s loss")
    return reader


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


@dataclass(frozen=True)
class SwiftExport:
    """A cached dataset of ms-swift; `arguments` are those of `swift sft` or `megatron sft`."""

    path: str
    num_packs: int
    num_sequences: int
    arguments: str


def export_to_swift(
    source: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    pack_size: int | None = None,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> SwiftExport:
    """Write a dataset as a folder for `--cached_dataset`; arguments are those of `convert_dataset`.

    Raises:
        ConfigError: `folder` is in object storage.
        FormatError: a dataset is there, or the source cannot be read, or trains the last position of a sequence.
    """
    root = Path(folder)
    with closing(_open_plain(source, folder, "ms-swift")) as reader, explain_os_errors(str(root)):
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and not (overwrite and (root / _DATA).exists()):
            fix = "specify an empty folder" + (", or set --overwrite" if (root / _DATA).exists() else "")
            raise FormatError("the folder is not empty", where=str(root), fix=fix)
        # Written last: without it the folder is no dataset.
        (root / _STATE).unlink(missing_ok=True)
        size = reader.pack_size if pack_size is None else pack_size
        with pa.OSFile(str(root / _DATA), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as stream:
            for start in range(0, len(reader), _BATCH):
                packs = reader.read(range(start, min(start + _BATCH, len(reader))))
                rows = [row for pack in packs for row in _rows(pack, size)]
                stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
                if progress is not None:
                    progress("convert", min(start + _BATCH, len(reader)), len(reader))
        # As `load_from_disk` of Hugging Face's datasets reads it.
        state: dict[str, Any] = {"_data_files": [{"filename": _DATA}], "_format_kwargs": {}}
        state |= {"_output_all_columns": False, "_fingerprint": reader.fingerprint.rpartition(":")[2][:16]}
        state |= dict.fromkeys(("_format_columns", "_format_type", "_split"))
        for name, text in ((_PLUGIN, _TEMPLATE), ("dataset_info.json", "{}"), (_STATE, json.dumps(state))):
            write_atomically(root / name, text.encode())
        arguments = (
            f"--cached_dataset {root} --external_plugins {root / _PLUGIN} --template {TEMPLATE} --packing true "
            f"--packing_strategy sequential --packing_length {size} --max_length {size}"
        )
        return SwiftExport(str(root), len(reader), int(reader.sequence_lengths.shape[0]), arguments)


def _rows(pack: Pack, pack_size: int) -> list[dict[str, object]]:
    if len(pack) > pack_size:
        what = f"a pack has {len(pack):,} tokens, more than the {pack_size:,} of data.pack_size"
        raise FormatError(what, fix="set data.pack_size to the size of the longest pack")
    scale = (labels_of_pack(pack) != IGNORED_LABEL).view(np.uint8)
    bounds = np.append(pack.seq_start_id, len(pack)).tolist()
    rows: list[dict[str, object]] = []
    for start, stop in itertools.pairwise(bounds):
        content = {"token_ids": pack.input_ids[start:stop], "loss_scale": scale[start:stop]}
        room = pack_size - len(pack) if stop == len(pack) else 0
        rows.append({"messages": [{"role": "assistant", "content": content}], "lengths": [stop - start + room]})
    return rows
