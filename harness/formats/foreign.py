"""Packed data of other tools as datasets, each by its own convention, and datasets as files of two of the tools.

Data that a pack cannot hold is removed and counted; nothing is dropped silently. Padding is removed if the tool stores
real lengths, and kept if not: a token that looks like padding may be an end of sequence, so it is never guessed.

| convention | reads | masks | padding |
|---|---|---|---|
| megatron_bridge | `*.idx.parquet`, `.npy`, or the prefix of a `.sft.bin`/`.sft.idx` pair | as ours | unknown: kept |
| nemotron | a folder of `shard_*.parquet`, or one that has `splits/<split>/` | as ours | never stored |
| ms_swift | chunks, `chunk_*.jsonl`, labels aligned with tokens | moved by one | cut off by `lengths` |
| megatron_lm | rows of `SFTDataset` as JSONL: tokens, labels, loss_mask, cu_seqlens | as ours | unknown: kept |

Megatron-Bridge counts a sequence of L tokens as L - 1 against its pack size, so its packs can exceed that size: the
imported `pack_size` is that of the longest pack unless one is given. Nemotron releases up to early 2026 moved masks the
wrong way (`[0] + mask[:-1]` over the whole pack); the stored bits do not reveal the release.

For export: Megatron-Bridge 0.6 reads files of packs in the folder `packed` of its dataset root, and
`SIZE_metadata.jsonl` beside them: a JSON list of one record of figures for each file. It looks for its own files under
a name with a hash of its settings, so that the settings that are printed name these.

ms-swift 4.6 stores rows of `messages` and `lengths` as a cached dataset, packs by the lengths, and renders a row in
every step. A message can be a list of tokens with a weight each, which a template without any text of its own leaves as
they are: it is written as a plugin. The last sequence of a pack is listed with the room that is left in it, so that the
packing strategy `sequential` makes the stored packs again.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.checks import CheckedSettings, one_of
from harness.errors import ConfigError, FormatError
from harness.formats.convert import convert_dataset
from harness.formats.inspect import find_tokenizer_folder
from harness.formats.layouts.jsonl import (
    IGNORED_LABEL,
    JsonlShard,
    check_counts,
    check_labels,
    labels_of_pack,
    pack_of_labels,
    parse_line,
    whole_numbers,
)
from harness.formats.manifest import Manifest, Provenance, load_manifest
from harness.formats.opening import open_dataset, refuse_parts
from harness.formats.reader import PackReader, require_plain
from harness.formats.writer import open_writer
from harness.indexed.index import BIN, IDX, read_lengths, with_suffix
from harness.records import Int32Array, Pack
from harness.settings import load
from harness.storage import is_uri, natural_key, write_atomically
from harness.storage.files import explain_os_errors

# Changes of an import, as counted in the manifest's provenance.
CLEARED_LAST = "import_cleared_last_positions"
CLEARED_FIRST = "import_cleared_first_labels"
REMOVED_PADDING = "import_removed_padding_tokens"
APPENDED_LAST = "import_appended_last_labels"

_ROW_MAGIC = 0x53465442  # Megatron-Bridge's packed rows in an indexed dataset begin with it.
_ROW_VERSION = 1
_ROW_HEAD = 3
_FIX = "correct the row in the tool that wrote it, or set the convention of that tool"


# Packs of another tool: a function that reads them one at a time and counts what it changes, and their number.
ForeignPacks = tuple[Callable[[Counter[str]], Iterator[Pack]], int]


def import_dataset(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    convention: str,
    format: str = "parquet",
    pack_size: int | None = None,
    split: str = "train",
    packs_per_shard: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write another tool's packed data as a dataset; its provenance counts the positions that changed, by kind.

    Args:
        source: file, folder, glob or prefix that the tool wrote.
        destination, format, packs_per_shard, overwrite: as for `open_writer`.
        convention: a key of CONVENTIONS.
        pack_size: tokens that no pack exceeds; the longest pack's if None, which reads the source twice.
        split: of the tool's folder, if that has several.
        progress: called with packs done and packs in total.

    Raises:
        ConfigError: an unknown convention.
        FormatError: the source does not follow the convention (the error names file and row).
    """
    if convention not in CONVENTIONS:
        known = ", ".join(CONVENTIONS)
        raise ConfigError(f"unknown convention {convention!r}", where="convention", fix=f"use one of {known}")
    if not is_uri(str(source)):
        if Path(source).is_dir() and load_manifest(Path(source)) is not None:
            raise _ours(source)
        refuse_parts([Path(source)])
    packs, num_packs = CONVENTIONS[convention](str(source), split)
    if pack_size is None:
        pack_size = max((len(pack) for pack in packs(Counter())), default=0)
        if not pack_size:
            fix = "set the path to the output of the tool, or set split=NAME"
            raise FormatError("the source contains no packs", where=str(source), fix=fix)
    counts: Counter[str] = Counter()
    provenance = Provenance(packer=convention)
    with open_writer(
        destination,
        format=format,
        pack_size=pack_size,
        provenance=provenance,
        packs_per_shard=packs_per_shard,
        overwrite=overwrite,
    ) as writer:
        for pack in packs(counts):
            writer.append(pack)
            if progress is not None:
                progress(writer.num_packs, num_packs)
        # The count is known only after all packs are read; `__exit__` writes the manifest.
        writer.provenance = replace(provenance, counts=dict(+counts))
    assert writer.manifest is not None
    return writer.manifest


def _ours(source: str | PathLike[str]) -> FormatError:
    fix = "use it directly; to change its format, run `harness convert SRC DST FORMAT`"
    return FormatError("this dataset was written by the harness, not by another tool", where=str(source), fix=fix)


def _read_megatron_bridge(source: str, _split: str) -> ForeignPacks:
    prefix = Path(source)
    if prefix.suffix in (BIN, IDX):
        prefix = prefix.with_suffix("")
    if with_suffix(prefix, IDX).is_file() and with_suffix(prefix, BIN).is_file():
        return _read_bridge_rows(prefix)
    return _read_dataset(source)


def _read_nemotron(source: str, split: str) -> ForeignPacks:
    folder = Path(source)
    for candidate in (folder / "splits" / split, folder / split):
        if candidate.is_dir():
            return _read_dataset(str(candidate))
    if (folder / "splits").is_dir():
        splits = ", ".join(sorted(entry.name for entry in (folder / "splits").iterdir()))
        raise FormatError(f"there is no split {split!r}", where=source, fix=f"use one of {splits}")
    return _read_dataset(source)


def _read_dataset(source: str) -> ForeignPacks:
    reader = open_dataset(source)
    if reader.manifest is not None:
        raise _ours(source)

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for pack in reader:
            yield clear_last_positions(pack, counts)

    return packs, len(reader)


def _read_bridge_rows(prefix: Path) -> ForeignPacks:
    """Read an indexed dataset whose items are whole packs."""
    lengths = read_lengths(with_suffix(prefix, IDX))
    data = with_suffix(prefix, BIN)
    total = 4 * int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != total:
        raise FormatError(f"has {data.stat().st_size:,} bytes, but its index lists {total:,}", where=str(data))

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        with data.open("rb") as file:
            for row, length in enumerate(lengths.tolist()):
                with _named(f"{data}, item {row:,}"):
                    pack = pack_of_bridge_row(np.frombuffer(file.read(4 * length), "<i4"))
                yield clear_last_positions(pack, counts)

    return packs, lengths.shape[0]


def _read_swift(source: str, _split: str) -> ForeignPacks:
    if (Path(source) / "state.json").is_file():
        what = "a cached dataset of ms-swift stores chats, which it renders and packs during training, not packs"
        raise FormatError(what, where=source, fix="pack the chats: harness prepare source.path=CACHE data.path=DIR")
    return _read_jsonl(source, pack_of_swift)


def _read_jsonl(source: str, pack_of: Callable[[dict[str, Any], Counter[str]], Pack]) -> ForeignPacks:
    """Read the rows of a file, or of all `.jsonl` files of a folder in natural order."""
    path = Path(source)
    paths = sorted(path.glob("*.jsonl"), key=lambda file: natural_key(file.name)) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise FormatError("there is no .jsonl file", where=source, fix="check the path")

    def packs(counts: Counter[str]) -> Iterator[Pack]:
        for file in paths:
            with closing(JsonlShard(file)) as shard:
                for row in range(shard.num_packs):
                    with _named(shard.where(row)):
                        pack = pack_of(parse_line(shard.line(row)), counts)
                        if problem := pack.problem():
                            raise FormatError(problem)
                    yield pack

    return packs, sum(JsonlShard(file).num_packs for file in paths)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Name the row that cannot be converted."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"the row {error.what}", where=where, fix=_FIX) from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise FormatError(f"the row cannot be read: {str(error)[:200]}", where=where, fix=_FIX) from None


def clear_last_positions(pack: Pack, counts: Counter[str]) -> Pack:
    """Untrain the last position of each sequence, which has no next token to predict."""
    lasts = np.append(pack.seq_start_id[1:], len(pack)) - 1
    trained = int(np.count_nonzero(pack.loss_mask[lasts]))
    if not trained:
        return pack
    counts[CLEARED_LAST] += trained
    mask = pack.loss_mask.copy()
    mask[lasts] = 0
    return Pack(pack.input_ids, mask, pack.seq_start_id)


def pack_of_bridge_row(words: Int32Array) -> Pack:
    """Convert an item of an indexed dataset: head, starts, and tokens with the mask in their highest bit."""
    if words.shape[0] < _ROW_HEAD or words[0] != _ROW_MAGIC or words[1] != _ROW_VERSION:
        raise FormatError("does not begin with the header of a packed row, version 1")
    num_starts = int(words[2])
    begin = _ROW_HEAD + num_starts
    if not num_starts > 0 or begin >= words.shape[0]:
        raise FormatError(f"claims {num_starts:,} sequences in {words.shape[0]:,} words")
    tokens = words[begin:].view(np.uint32)
    mask = (tokens >> np.uint32(31)).astype(np.uint8)
    pack = Pack((tokens & np.uint32(0x7FFFFFFF)).astype(np.int32), mask, words[_ROW_HEAD:begin].astype(np.int32))
    if problem := pack.problem():
        raise FormatError(problem)
    return pack


def pack_of_swift(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a pre-packed line: labels aligned with tokens, -100 if untrained; `lengths` are without padding."""
    ids, labels, lengths = (whole_numbers(fields, name) for name in ("input_ids", "labels", "lengths"))
    real = check_counts(ids, labels, lengths, is_padded=True)
    counts[REMOVED_PADDING] += ids.shape[0] - real
    pack, firsts = pack_of_labels(ids[:real], labels[:real], np.cumsum(lengths) - lengths)
    counts[CLEARED_FIRST] += int(np.count_nonzero(firsts))
    return pack


def pack_of_megatron_lm(fields: dict[str, Any], counts: Counter[str]) -> Pack:
    """Convert a row of `SFTDataset`: labels[j] is the token after tokens[j], or -100; `cu_seqlens` bounds sequences.

    The row was cut by one token to align it, so the label of its last position is missing from `tokens`: if trained,
    it is appended, and trained as before.
    """
    ids, labels, bounds = (whole_numbers(fields, name) for name in ("tokens", "labels", "cu_seqlens"))
    n = ids.shape[0]
    if labels.shape != ids.shape or n == 0:
        raise FormatError(f"has {n:,} tokens but {labels.shape[0]:,} labels")
    if bounds.shape[0] < 2 or bounds[0] != 0 or bounds[-1] > n or (np.diff(bounds) <= 0).any():
        raise FormatError(f"has cu_seqlens {bounds.tolist()[:8]} for {n:,} tokens")
    trained = labels != IGNORED_LABEL
    if "loss_mask" in fields:
        stored = np.asarray(fields["loss_mask"], np.float64)
        if stored.shape != ids.shape or not np.isin(stored, (0.0, 1.0)).all():
            raise FormatError("has a loss_mask that is not a 0 or 1 for each token")
        trained &= stored == 1.0
    ids, labels, trained = ids[: bounds[-1]], labels[: bounds[-1]], trained[: bounds[-1]].copy()
    counts[REMOVED_PADDING] += n - ids.shape[0]
    lasts = bounds[1:] - 1
    inner = lasts[:-1]
    counts[CLEARED_LAST] += int(np.count_nonzero(trained[inner]))
    trained[inner] = False
    if trained[-1]:
        counts[APPENDED_LAST] += 1
        ids = np.append(ids, labels[-1])
        trained = np.append(trained, False)
        labels = np.append(labels, IGNORED_LABEL)
    at = np.flatnonzero(trained)
    check_labels(labels[at], ids[at + 1], at)
    return Pack(ids, trained, bounds[:-1])


CONVENTIONS: dict[str, Callable[[str, str], ForeignPacks]] = {
    "megatron_bridge": _read_megatron_bridge,
    "nemotron": _read_nemotron,
    "ms_swift": _read_swift,
    "megatron_lm": lambda source, _split: _read_jsonl(source, pack_of_megatron_lm),
}


# ---- exports

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

    ConfigError if `root` is in object storage, FormatError as for `convert_dataset`, or if the figures of another split
    cannot be read.

    Args:
        root: folder that Bridge's configuration names as dataset_root.
        files: names; None for the defaults of BridgeFiles. Other arguments are those of `convert_dataset`.
    """
    files = files or BridgeFiles()
    with closing(_open_plain(source, root, "Megatron-Bridge")) as reader:
        size = reader.pack_size if pack_size is None else pack_size
        folder = Path(root) / "packed"
        path = folder / f"{files.split}_{size}{_SUFFIXES[files.file_format]}"
        metadata_path = folder / f"{size}_metadata.jsonl"
        others: list[dict[str, Any]] = []
        with explain_os_errors(metadata_path), suppress(FileNotFoundError, NotADirectoryError):
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
    with ExitStack() as stack:
        reader = stack.enter_context(closing(open_dataset(source)))
        require_plain(reader, f"{trainer}'s loss")
        stack.pop_all()
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

    ConfigError if `folder` is in object storage; FormatError if a dataset is there, or the source cannot be read, or
    trains the last position of a sequence.
    """
    root = Path(folder)
    with closing(_open_plain(source, folder, "ms-swift")) as reader, explain_os_errors(str(root)):
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and not (overwrite and (root / _DATA).exists()):
            fix = "specify an empty folder" + (", or set --overwrite" if (root / _DATA).exists() else "")
            raise FormatError("the folder is not empty", where=str(root), fix=fix)
        # Written last: without this file, the folder is not a dataset.
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
