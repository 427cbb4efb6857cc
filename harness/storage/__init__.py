"""One door to files: on a disk or in object storage, complete or absent, read by ranges, downloaded once a machine.

    open_folder("data/sft")            a Folder on a disk; of a URI such as s3://bucket/sft, one in object storage
    open_source(place)                 one file, read by ranges; open_stream(place), front to back
    name_bus_errors()                 a mapped file that became unreadable is named
    AtomicFile(path)                   a file that exists under its name only once it is complete
    Marker(path)                       the lock of a writer, which outlives it if it is killed
    copy_to_node(path, local_dir)      a folder copied to this node's disk, and local_copy(path), which finds it
    write_checksums(folder, files)     sizes and hashes of a checkpoint or an export, and a hash of themselves

Read `folders` first: the interface that readers and writers of datasets use.
"""

from __future__ import annotations

from harness.storage.arrays import NpyStream, map_npy, npy_header, read_npy_header
from harness.storage.cache import LocalCache
from harness.storage.checksums import (
    CHECKSUMS_FILE,
    digest_files,
    list_hash_problems,
    list_size_problems,
    read_checksums,
    share_of,
    write_checksums,
)
from harness.storage.claims import ClaimStore, Lease, ListedObject, lease_body, leased
from harness.storage.connections import s3_endpoint
from harness.storage.files import (
    TEMPORARY_SUFFIX,
    AtomicFile,
    Marker,
    OutputFile,
    Stamp,
    StoredFile,
    file_digest,
    make_folder,
    natural_key,
    sync_folder,
    sync_path,
    sync_tree,
)
from harness.storage.folders import BucketFolder, Folder, LocalFolder, open_folder, write_atomically
from harness.storage.inputs import digest_of, glob_pattern, is_glob, list_objects, open_stream, parse_place, stamp_of
from harness.storage.local_copies import LocalCopy, copy_to_node, local_copy, read_originals
from harness.storage.mapped import bus_error_at, name_bus_errors
from harness.storage.ranges import ByteSource, open_source
from harness.storage.uris import ObjectPath, Place, is_uri, join_path, relative_path, resolve_path

__all__ = [
    "CHECKSUMS_FILE",
    "TEMPORARY_SUFFIX",
    "AtomicFile",
    "BucketFolder",
    "ByteSource",
    "ClaimStore",
    "Folder",
    "Lease",
    "ListedObject",
    "LocalCache",
    "LocalCopy",
    "LocalFolder",
    "Marker",
    "NpyStream",
    "ObjectPath",
    "OutputFile",
    "Place",
    "Stamp",
    "StoredFile",
    "bus_error_at",
    "copy_to_node",
    "digest_files",
    "digest_of",
    "file_digest",
    "glob_pattern",
    "is_glob",
    "is_uri",
    "join_path",
    "lease_body",
    "leased",
    "list_hash_problems",
    "list_objects",
    "list_size_problems",
    "local_copy",
    "make_folder",
    "map_npy",
    "name_bus_errors",
    "natural_key",
    "npy_header",
    "open_folder",
    "open_source",
    "open_stream",
    "parse_place",
    "read_checksums",
    "read_npy_header",
    "read_originals",
    "relative_path",
    "resolve_path",
    "s3_endpoint",
    "share_of",
    "stamp_of",
    "sync_folder",
    "sync_path",
    "sync_tree",
    "write_atomically",
    "write_checksums",
]
