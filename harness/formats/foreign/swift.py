"""A dataset as a cached dataset of ms-swift, whose sequences are tokens instead of chats.

ms-swift stores rows of `messages` and `lengths`, packs by the lengths, and renders a row in every step. A message can
be a list of tokens with a weight each, which a template without any text of its own leaves as they are: it is written
as a plugin. The last sequence of a pack is listed with the room that is left in it, so that the packing strategy
`sequential` makes the stored packs again.

Written for ms-swift 4.6.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.errors import ConfigError, FormatError
from harness.formats.layouts.jsonl import IGNORED_LABEL, labels_of_pack
from harness.formats.opening import open_dataset
from harness.formats.reader import PackReader, require_plain
from harness.records import Pack
from harness.storage import is_uri, write_atomically
from harness.storage.files import explain_os_errors

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
    if is_uri(str(folder)):
        what = "a cached dataset of ms-swift cannot be written to object storage"
        raise ConfigError(what, where=str(folder), fix="write it to a local folder, then upload it")
    root = Path(folder)
    with closing(open_dataset(source)) as reader, explain_os_errors(str(root)):
        require_plain(reader, "ms-swift's loss")
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
        for name, text in ((_PLUGIN, _TEMPLATE), ("dataset_info.json", "{}"), (_STATE, _state(reader))):
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


def _state(reader: PackReader) -> str:
    """Return the state that `load_from_disk` of Hugging Face's datasets reads."""
    fingerprint = reader.fingerprint.rpartition(":")[2][:16]
    empty = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    settings = {"_format_kwargs": {}, "_output_all_columns": False, "_fingerprint": fingerprint}
    return json.dumps({"_data_files": [{"filename": _DATA}], **settings, **empty})
