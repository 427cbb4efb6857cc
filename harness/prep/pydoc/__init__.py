"""The built-in corpus: documentation of Python's standard library as conversations, so that every machine has data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.errors import PrepError

__all__ = ["write_pydoc_corpus"]

_SCRIPT = Path(__file__).with_name("collect.py")
_TIMEOUT_S = 300


def write_pydoc_corpus(path: Path) -> None:
    """Write questions and answers about the standard library as JSONL, the same on every run of one Python.

    A process of its own imports the library's modules, without site packages, display or standard input.

    Args:
        path: the file to write; it appears whole or not at all.

    Raises:
        PrepError: collecting failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # -P and -S: the script's folder must not hide modules, and installed packages must not add any.
    command = [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", str(_SCRIPT), str(temporary.resolve())]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    fix = "use another Python, or name your own chat data with source=files source.path=..."
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
        raise PrepError(f"collecting Python's documentation failed: {error}", where=sys.executable, fix=fix) from error
    if result.returncode != 0 or not temporary.exists():
        message = " ".join(result.stderr.decode(errors="replace").strip().splitlines()[-1:])
        what = f"collecting Python's documentation ended with code {result.returncode}: {message}"
        raise PrepError(what, where=sys.executable, fix=fix)
    temporary.replace(path)
