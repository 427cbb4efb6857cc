"""Built indices that runs on several machines share through a bucket: one builds them, the others copy them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from harness.printing import print_line
from harness.storage import BucketFolder, ClaimStore, LocalCache, ObjectPath, leased, write_atomically

_BUILDING = "_building"
# Megatron trusts a set of indices that has one, so it is uploaded last.
_DESCRIPTION = "-description.txt"


class SharedIndices:
    """The indices at a URI, and copies of those that this machine needs.

    Args:
        uri: of a prefix in a bucket.

    Attributes:
        folder: of the copies, in the local cache.

    Raises:
        ConfigError: the URI is malformed, or of object storage without conditional requests.
    """

    def __init__(self, uri: str) -> None:
        self._place = ObjectPath.parse(uri)
        self._store = ClaimStore(self._place)
        self.folder = LocalCache().folder / "index_cache" / hashlib.sha256(str(self._place).encode()).hexdigest()[:16]

    @contextmanager
    def fetching(self, *, builds: bool) -> Iterator[None]:
        """Copy indices that Megatron looks for in `folder` as it does.

        Args:
            builds: the process builds what is missing: it waits for another builder, and uploads what it has made.
        """
        if not builds:
            with self._fetching():
                yield
            return
        with leased(
            self._store, _BUILDING, log=lambda line: print_line(f"building indices: {line}", flush=True)
        ) as lease:
            with self._fetching() as remote:
                yield
            remote.check = lease.check
            self._upload(remote)

    @contextmanager
    def _fetching(self) -> Iterator[BucketFolder]:
        remote = BucketFolder(self._place)
        there = set(remote.files())
        is_file = os.path.isfile

        def fetch(path: str | os.PathLike[str]) -> bool:
            found = Path(path)
            if found.parent == self.folder and found.name in there and not is_file(path):
                self._download(remote, found)
            return is_file(path)

        with mock.patch("os.path.isfile", fetch):
            yield remote

    def _download(self, remote: BucketFolder, path: Path) -> None:
        place = remote.place / path.name
        blocks = remote.store.read_blocks(place, remote.find_size(path.name))
        write_atomically(path, blocks)

    def _upload(self, remote: BucketFolder) -> None:
        names = [path.name for path in self.folder.glob("*Dataset-*")]
        for name in sorted(names, key=lambda name: (name.endswith(_DESCRIPTION), name)):
            remote.upload(name, self.folder / name)
