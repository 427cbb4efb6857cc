"""The fingerprint of a plan, kept beside it once all its packs were read for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.formats.manifest import MANIFEST_NAME
from harness.storage import file_digest, write_atomically

_NAME = "fingerprint.json"


@dataclass(frozen=True)
class KeptFingerprint:
    """A file in a dataset's folder. It holds for one manifest, and so for one plan over one store."""

    folder: Path

    def load(self) -> str | None:
        """The fingerprint, or None where it is not known."""
        try:
            values = json.loads((self.folder / _NAME).read_bytes())
            if values["manifest_xxh3"] != file_digest(self.folder / MANIFEST_NAME):
                return None
            return str(values["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def take(self, compute: Callable[[], str]) -> str:
        """The kept fingerprint, or the one that is computed and then kept.

        All ranks of a job ask at once: one of a node computes, the others wait for it. Where the folder cannot be
        written to it is computed each time.
        """
        known = self.load()
        if known is not None:
            return known
        with self._alone():
            known = self.load()
            if known is None:
                known = compute()
                with contextlib.suppress(OSError):
                    self._save(known)
        return known

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self.folder / MANIFEST_NAME, os.O_RDONLY)
        try:
            # Some network file systems have no locks; then each computes.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _save(self, fingerprint: str) -> None:
        values = {"manifest_xxh3": file_digest(self.folder / MANIFEST_NAME), "fingerprint": fingerprint}
        write_atomically(self.folder / _NAME, (json.dumps(values, indent=1) + "\n").encode())
