"""Six formats, one dataset: whatever the layout on disk, the same packs, order and fingerprint.

    reader = open_dataset("data/sft")                   a path, glob or URI; files of other tools open too
    pack = reader[0]; packs = reader.read([3, 1])
    with open_writer("out", format="memmap", pack_size=4096) as writer:
        writer.append(pack)
    convert_dataset("data/sft", "out", format="jsonl")  verified against the source
    verify_dataset("out")                               every problem; [] if there is none

A dataset is a folder of shards, an index of lengths and checksums, and a manifest that is written last: a folder
without one is an incomplete dataset, which is refused (`incomplete`). Read `opening`, `reader`, `index`, `manifest` and
`writer` in this order; `base` is the interface that a new format implements.
"""

from __future__ import annotations

from harness.formats.base import FORMATS, Format, ShardOptions, ShardReader, load_format
from harness.formats.convert import convert_dataset
from harness.formats.digest import pack_digest
from harness.formats.foreign import BRIDGE, CONVENTIONS, BridgeExport, BridgeFiles, export_to_bridge, import_dataset
from harness.formats.incomplete import find_traces, repair_manifest
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, IndexPart, load_index, write_index
from harness.formats.inspect import (
    Decoder,
    find_datasets,
    find_tokenizer,
    find_tokenizer_folder,
    inspect_dataset,
    render_pack,
    render_runs,
    render_summary,
    text_runs,
)
from harness.formats.jsonl import JsonlShard, line_of_pack, pack_of_line
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, load_manifest
from harness.formats.opening import holds_dataset, holds_manifest, open_dataset
from harness.formats.parquet import Chunk, read_pages
from harness.formats.reader import PackReader
from harness.formats.verify import PackDifference, describe_checks, diff_datasets, verify_dataset
from harness.formats.virtual import open_store, write_plan
from harness.formats.writer import PackWriter, open_writer

__all__ = [
    "BRIDGE",
    "CONVENTIONS",
    "FORMATS",
    "INDEX_FOLDER",
    "INDEX_NAMES",
    "MANIFEST_NAME",
    "BridgeExport",
    "BridgeFiles",
    "Chunk",
    "Decoder",
    "Format",
    "IndexPart",
    "JsonlShard",
    "Manifest",
    "PackDifference",
    "PackReader",
    "PackWriter",
    "Provenance",
    "Shard",
    "ShardOptions",
    "ShardReader",
    "convert_dataset",
    "describe_checks",
    "diff_datasets",
    "export_to_bridge",
    "find_datasets",
    "find_tokenizer",
    "find_tokenizer_folder",
    "find_traces",
    "holds_dataset",
    "holds_manifest",
    "import_dataset",
    "inspect_dataset",
    "line_of_pack",
    "load_format",
    "load_index",
    "load_manifest",
    "open_dataset",
    "open_store",
    "open_writer",
    "pack_digest",
    "pack_of_line",
    "read_pages",
    "render_pack",
    "render_runs",
    "render_summary",
    "repair_manifest",
    "text_runs",
    "verify_dataset",
    "write_index",
    "write_plan",
]
