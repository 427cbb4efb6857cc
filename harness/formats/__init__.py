"""Six storage formats with the same packs, order and fingerprint.

    reader = open_dataset("data/sft")                   a path, glob or URI; files of other tools open too
    pack = reader[0]; packs = reader.read([3, 1])
    with open_writer("out", format="memmap", pack_size=4096) as writer:
        writer.append(pack)
    convert_dataset("data/sft", "out", format="jsonl")  verified against the source
    verify_dataset("out")                               every problem; [] if there is none

A dataset is a folder of shards, an index of lengths and checksums, and a manifest that is written last; a folder
without a manifest is an incomplete dataset, which is refused. Images and sounds are in files next to the shards (see
`media`). Read `opening`, `reader`, `index`, `manifest` and `writer` in this order. A new format is a module of
`layouts` that implements the interface in `base`.
"""

from harness.formats.base import FORMATS, load_format
from harness.formats.convert import convert_dataset
from harness.formats.incomplete import repair_manifest
from harness.formats.manifest import Manifest, Provenance, load_manifest
from harness.formats.opening import holds_manifest, open_dataset
from harness.formats.reader import PackReader
from harness.formats.verify import diff_datasets, verify_dataset
from harness.formats.writer import open_writer

__all__ = [
    "FORMATS",
    "Manifest",
    "PackReader",
    "Provenance",
    "convert_dataset",
    "diff_datasets",
    "holds_manifest",
    "load_format",
    "load_manifest",
    "open_dataset",
    "open_writer",
    "repair_manifest",
    "verify_dataset",
]
