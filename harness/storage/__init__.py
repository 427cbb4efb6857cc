"""Files on a disk and in object storage: whole or not there at all, read by ranges, copied once per machine."""

from __future__ import annotations

from harness.storage.arrays import NpyStream, map_npy, npy_header, read_npy_header
from harness.storage.bucket import REQUEST_BYTES, ObjectStore
from harness.storage.cache import Entry, LocalCache
from harness.storage.files import (
    TEMPORARY_SUFFIX,
    AtomicFile,
    Marker,
    StoredFile,
    file_digest,
    natural_key,
    sync_folder,
    write_atomically,
)
from harness.storage.ranges import ByteSource, open_source
from harness.storage.uris import ObjectPath, is_uri, join_path, redact

__all__ = [
    "REQUEST_BYTES",
    "TEMPORARY_SUFFIX",
    "AtomicFile",
    "ByteSource",
    "Entry",
    "LocalCache",
    "Marker",
    "NpyStream",
    "ObjectPath",
    "ObjectStore",
    "StoredFile",
    "file_digest",
    "is_uri",
    "join_path",
    "map_npy",
    "natural_key",
    "npy_header",
    "open_source",
    "read_npy_header",
    "redact",
    "sync_folder",
    "write_atomically",
]
