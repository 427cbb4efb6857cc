"""Built indices that runs on several machines share through a bucket; one machine builds them, the others copy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from harness.printing import print_line
from harness.storage import BucketFolder, LocalCache, ObjectPath, write_atomically
from harness.storage.bucket import read_blocks
from harness.storage.claims import ClaimStore, Lease

_BUILDING = "_building"
# Megatron trusts a set of indices with a description, so it is uploaded last.
_DESCRIPTION = "-description.txt"
T = TypeVar("T")
# Copies the indices of a dataset, given the prefix of their names.
Fetch = Callable[[str], None]


def _upload_order(name: str) -> tuple[bool, str]:
    return name.endswith(_DESCRIPTION), name


def shared_kind(kind: Any, fetch: Fetch | None) -> Any:
    """Return a function that creates a `kind` dataset; `fetch` copies its indices before Megatron looks for them.

    Return `kind` itself if indices are not shared.
    """
    if fetch is None:
        return kind
    copy_indices: Fetch = fetch

    def make(*arguments: Any, **options: Any) -> Any:
        class Shared(kind):  # type: ignore[misc]
            def _build_document_sample_shuffle_indices(self) -> Any:
                copy_indices(f"{self.unique_description_hash}-{kind.__name__}-")
                return super()._build_document_sample_shuffle_indices()

            def _build_indices(self) -> Any:  # called for a blend
                copy_indices(f"{self.unique_description_hash}-{kind.__name__}-")
                return super()._build_indices()

        Shared.__name__ = kind.__name__  # used in file names and descriptions
        made = Shared(*arguments, **options)
        made.__class__ = kind  # workers receive the dataset, and copy nothing
        return made

    return make


class SharedIndices:
    """Indices at a URI, and local copies of those that this machine needs."""

    def __init__(self, uri: str) -> None:
        self._place = ObjectPath.parse(uri)
        self._store = ClaimStore(self._place)
        self.folder = LocalCache().folder / "index_cache" / hashlib.sha256(str(self._place).encode()).hexdigest()[:16]

    def run(self, build: Callable[..., T], *, builds: bool) -> T:
        """Return the result of `build(fetch=...)`; `fetch` copies the indices with a given name prefix to `folder`.

        If `builds` is set, the process may build missing indices: it waits for other builders, and uploads its results.
        """
        if not builds:
            return build(fetch=self._fetch_from(BucketFolder(self._place)))
        lease = Lease(self._store, _BUILDING)
        lease.acquire(wait=True, log=lambda line: print_line(f"building indices: {line}", flush=True))
        try:
            remote = BucketFolder(self._place)
            built = build(fetch=self._fetch_from(remote))
            remote.check = lease.check
            for name in sorted((path.name for path in self.folder.glob("*Dataset-*")), key=_upload_order):
                remote.upload(name, self.folder / name)
            return built
        finally:
            lease.release(remove=True)

    def _fetch_from(self, remote: BucketFolder) -> Fetch:
        there = sorted(remote.files(), key=_upload_order)

        def fetch(beginning: str) -> None:
            names = [name for name in there if name.startswith(beginning)]
            if names and names[-1].endswith(_DESCRIPTION):
                for name in names:
                    if not (self.folder / name).is_file():
                        write_atomically(self.folder / name, read_blocks(remote.place / name, remote.find_size(name)))

        return fetch
