"""Writing Parquet: one row group of packs at a time."""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.formats.base import FIELDS, ShardOptions, ShardWriter
from harness.records import Pack
from harness.storage import Folder
from harness.storage.files import OutputFile

SCHEMA = pa.schema(
    [
        pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
        for name, kind in zip(FIELDS, (pa.int32(), pa.uint8(), pa.int32()), strict=True)
    ]
)
_COMPRESSION_LEVEL = 1
METADATA_PREFIX = "harness."


class ParquetWriter(ShardWriter[OutputFile]):
    """Buffers one row group of packs and writes it."""

    def __init__(self, folder: Folder, name: str, options: ShardOptions) -> None:
        self._rows_per_group = options.rows_per_group
        self._packs: list[Pack] = []
        super().__init__([name], [folder.create_file(name)])
        try:
            self._writer = pq.ParquetWriter(
                self._files[0],
                SCHEMA,
                compression="zstd",
                compression_level=_COMPRESSION_LEVEL,
                use_dictionary=False,
                column_encoding={f"{field}.list.element": "BYTE_STREAM_SPLIT" for field in FIELDS[:2]},
                write_statistics=False,
                write_page_checksum=True,
                store_schema=False,
            )
        except BaseException:
            super().abort()
            raise

    def append(self, pack: Pack) -> None:
        # A copy, because the caller may reuse the arrays before the row group is written.
        self._packs.append(Pack(pack.input_ids.copy(), pack.loss_mask.copy(), pack.seq_start_id.copy()))
        if len(self._packs) == self._rows_per_group:
            self._flush()

    def finish(self, metadata: Mapping[str, bytes], /) -> list[str]:
        self._flush()
        if metadata:
            self._writer.add_key_value_metadata(
                {METADATA_PREFIX + key: _to_text(key, value) for key, value in metadata.items()}
            )
        self._writer.close()
        return super().finish(metadata)

    def abort(self) -> None:
        self._packs.clear()
        super().abort()
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()

    def _flush(self) -> None:
        if not self._packs:
            return
        columns = []
        for name, field in zip(FIELDS, SCHEMA, strict=True):
            rows = [getattr(pack, name) for pack in self._packs]
            offsets = np.zeros(len(rows) + 1, np.int32)
            np.cumsum([row.shape[0] for row in rows], out=offsets[1:])
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)), type=field.type))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(self._packs))
        self._packs.clear()


def _to_text(key: str, value: bytes) -> bytes:
    # Metadata is text to other tools; the manifest is text already.
    return value if key == "manifest" else base64.b64encode(zlib.compress(value, 1))
