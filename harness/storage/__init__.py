"""Access to files on a disk or in object storage: written completely or not at all, read by ranges, cached per machine.

    open_folder("data/sft")            a Folder on a disk; of a URI such as s3://bucket/sft, one in object storage
    open_source(place)                 one file, read by ranges; open_stream(place), front to back
    name_bus_errors()                 reports the name of a memory-mapped file that became unreadable
    AtomicFile(path)                   a file that gets its name only when it is complete
    Marker(path)                       lock file of a writer, which remains if the writer is killed
    copy_to_node(path, local_dir)      copies a folder to this node's disk; local_copy(path) finds the copy
    write_checksums(folder, files)     sizes and hashes of a checkpoint or an export, and a hash of the list

Read `folders` first: the interface that readers and writers of datasets use.
"""

from harness.storage.bucket import LocalCache
from harness.storage.checksums import read_checksums
from harness.storage.connections import ObjectPath, Place, is_uri, join_path
from harness.storage.files import Marker, StoredFile, file_digest, make_folder, name_bus_errors, natural_key, sync_path
from harness.storage.folders import BucketFolder, Folder, LocalFolder, open_folder, write_atomically
from harness.storage.inputs import parse_place, stamp_of

__all__ = [
    "BucketFolder",
    "Folder",
    "LocalCache",
    "LocalFolder",
    "Marker",
    "ObjectPath",
    "Place",
    "StoredFile",
    "file_digest",
    "is_uri",
    "join_path",
    "make_folder",
    "name_bus_errors",
    "natural_key",
    "open_folder",
    "parse_place",
    "read_checksums",
    "stamp_of",
    "sync_path",
    "write_atomically",
]
