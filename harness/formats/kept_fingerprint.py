"""The fingerprint of a plan, kept beside it once all its packs were read for it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from harness.formats.digest import file_digest
from harness.formats.files import write_atomically
from harness.formats.manifest import MANIFEST_NAME

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

    def save(self, fingerprint: str) -> None:
        """Keep it; where the folder cannot be written to, it is taken again the next time."""
        with contextlib.suppress(OSError):
            values = {"manifest_xxh3": file_digest(self.folder / MANIFEST_NAME), "fingerprint": fingerprint}
            write_atomically(self.folder / _NAME, (json.dumps(values, indent=1) + "\n").encode())
