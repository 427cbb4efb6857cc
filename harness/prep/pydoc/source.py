"""The built-in corpus: what Python's standard library says about itself, as conversations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.errors import PrepError
from harness.prep.pydoc import collect as pydoc_collect

_TIMEOUT_S = 300


def write_pydoc_corpus(path: Path) -> None:
    """Write questions and answers about the standard library as JSONL, the same on every run of one Python.

    A process of its own imports the library's modules, without site packages, a display or anything to read from.

    Args:
        path: the file to write; it appears whole or not at all.

    Raises:
        PrepError: collecting failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # -P and -S: this package's folder would hide `tokenize` and `inspect`, installed packages would add themselves.
    command = [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", pydoc_collect.__file__, str(temporary.resolve())]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        result = subprocess.run(
            command,
            env={**kept, "PYTHONHASHSEED": "0", "TERM": "dumb"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrepError(f"collecting Python's documentation failed: {error}", where=sys.executable) from error
    if result.returncode != 0 or not temporary.exists():
        said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise PrepError(
            f"collecting Python's documentation ended with code {result.returncode}: {' '.join(said)}",
            where=sys.executable,
            fix="use another Python, or name your own chat data with source=files source.path=...",
        )
    temporary.replace(path)
