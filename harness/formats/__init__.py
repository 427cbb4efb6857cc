"""Six formats, one dataset: `open_dataset` and `open_writer`, whatever the layout on disk."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path

from harness.errors import ConfigError
from harness.formats.base import Format
from harness.formats.digest import pack_digest
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, IndexPart, load_index, write_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, load_manifest
from harness.formats.opening import open_path
from harness.formats.parts import stored_files
from harness.formats.reader import PackReader
from harness.formats.writer import PackWriter
from harness.formats.writer_local import LocalPackWriter
from harness.storage import ObjectPath, is_uri, redact

__all__ = [
    "CONVENTIONS",
    "FORMATS",
    "INDEX_FOLDER",
    "INDEX_NAMES",
    "MANIFEST_NAME",
    "DatasetSummary",
    "Difference",
    "IndexPart",
    "Manifest",
    "PackReader",
    "PackWriter",
    "Provenance",
    "SequenceStore",
    "Shard",
    "convert_dataset",
    "diff_datasets",
    "diff_readers",
    "find_datasets",
    "find_tokenizer",
    "find_tokenizer_folder",
    "holds_manifest",
    "import_dataset",
    "inspect_dataset",
    "load_format",
    "load_index",
    "load_manifest",
    "open_dataset",
    "open_store",
    "open_writer",
    "pack_digest",
    "render_pack",
    "render_summary",
    "stored_files",
    "verify_dataset",
    "write_index",
    "write_plan",
]

# Name -> module that defines `FORMAT`. A new format is one file and one line here. Files without a manifest are tried
# in this order; parquet is last because pyarrow takes longest to import.
FORMATS: dict[str, str] = {
    "npy": "harness.formats.npy.shard",
    "memmap": "harness.formats.memmap",
    "binidx": "harness.formats.binidx",
    "jsonl": "harness.formats.jsonl",
    "virtual": "harness.formats.virtual.store",
    "parquet": "harness.formats.parquet.shard",
}


def load_format(name: str) -> Format:
    """The format of that name; raises ConfigError for an unknown one."""
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}", where="format", fix=f"use one of {', '.join(FORMATS)}")
    module = importlib.import_module(FORMATS[name])
    found: Format = module.FORMAT
    return found


def open_dataset(path: str | PathLike[str]) -> PackReader:
    """Open a stored dataset.

    Args:
        path: a dataset folder; a folder, file or prefix of another tool in a layout that a format knows; a glob of
            files, taken in natural order; or any of these in object storage (`s3://`, `gs://`, `abfs://`), where
            Parquet is read by ranges and other formats from local copies (see `storage` and `cache`).

    Returns:
        a reader, before any pack is read. Files without a manifest are looked through for their lengths first.

    Raises:
        FormatError: nothing is there, an interrupted write is, or shards are missing, cut short, extra or of another
            schema.
    """
    return open_path(str(path), tuple(FORMATS), load_format)


def holds_manifest(path: str | PathLike[str]) -> bool:
    """Whether a folder, on a disk or in object storage, has a manifest; it is not read."""
    if is_uri(str(path)):
        from harness.storage import ObjectStore

        place = ObjectPath.parse(str(path)) / MANIFEST_NAME
        return ObjectStore(place).find_size(place) is not None
    return (Path(path) / MANIFEST_NAME).exists()


def open_writer(
    path: str | PathLike[str],
    *,
    format: str = "parquet",
    pack_size: int,
    provenance: Provenance | None = None,
    packs_per_shard: int | None = None,
    rows_per_group: int = 64,
    overwrite: bool = False,
    resume_key: str | None = None,
) -> PackWriter:
    """A writer for a new dataset, to be used in a `with` block.

    Args:
        path: a new or empty folder; or, where the format has one, a file with its suffix (`.npy`, `.parquet`), which
            then is the whole dataset. Parquet can also be written to either in object storage.
        format: one of FORMATS.
        pack_size: tokens that no pack may exceed.
        provenance: stored in the manifest.
        packs_per_shard: the format's default where None. A single file has no shards.
        rows_per_group: packs in a Parquet row group, the unit that is decoded at once; other formats have none.
        overwrite: replace a dataset that is there. It is gone from the start, not from the end.
        resume_key: names the content. An interrupted write with the same key and settings is gone on with after its
            last whole shard: append from pack `writer.num_packs` on. Not for single files and not in object storage,
            where a write begins anew.

    Raises:
        ConfigError: an unknown format, a number below 1, or a destination with another format's suffix.
        FormatError: on entering, where the destination is in use, is not empty or cannot be written.
    """
    chosen = load_format(format)
    _check_destination(str(path), chosen)
    packs_per_shard = chosen.packs_per_shard if packs_per_shard is None else packs_per_shard
    if is_uri(str(path)):
        from harness.formats.writer_remote import RemotePackWriter

        return RemotePackWriter(
            ObjectPath.parse(str(path)),
            format=chosen,
            pack_size=pack_size,
            provenance=provenance or Provenance(),
            packs_per_shard=packs_per_shard,
            rows_per_group=rows_per_group,
            overwrite=overwrite,
        )
    return LocalPackWriter(
        Path(path),
        format=chosen,
        pack_size=pack_size,
        provenance=provenance or Provenance(),
        packs_per_shard=packs_per_shard,
        rows_per_group=rows_per_group,
        overwrite=overwrite,
        resume_key=resume_key,
    )


def _check_destination(path: str, format: Format) -> None:
    for name in FORMATS:
        if name != format.name and path.endswith(f".{name}"):
            raise ConfigError(
                f"the destination ends in .{name} but the format is {format.name}",
                where=redact(path),
                fix=f"use format {name!r}, or another name",
            )


# These use the functions above.
from harness.formats.convert import convert_dataset  # noqa: E402
from harness.formats.importers import CONVENTIONS, import_dataset  # noqa: E402
from harness.formats.inspect import (  # noqa: E402
    DatasetSummary,
    find_datasets,
    find_tokenizer,
    find_tokenizer_folder,
    inspect_dataset,
    render_pack,
    render_summary,
)
from harness.formats.verify import Difference, diff_datasets, diff_readers, verify_dataset  # noqa: E402
from harness.formats.virtual import SequenceStore, open_store, write_plan  # noqa: E402
