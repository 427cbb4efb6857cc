"""Copy the data of a run to the disk of this node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.errors import FormatError, HarnessError
from harness.formats import PackReader
from harness.launch.preflight.judge import COPY_OF
from harness.loader import DataConfig, open_datasets
from harness.storage import read_checksums
from harness.storage.local_copies import copy_to_node


def copy_checks(paths: list[str], local_dir: Path, *, timeout_s: float) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return checks for `run_checks` that copy each path to this node, and end where no byte comes for `timeout_s`."""
    return {COPY_OF + path: _copying(path, local_dir, timeout_s) for path in paths}


def _copying(path: str, local_dir: Path, timeout_s: float) -> Callable[[], dict[str, Any]]:
    def copy() -> dict[str, Any]:
        began = last = time.monotonic()
        results: list[dict[str, Any] | HarnessError] = []

        def progress(num_bytes: int) -> None:
            nonlocal last
            last = time.monotonic()

        def work() -> None:
            try:
                made = copy_to_node(path, local_dir, known=known_hashes(path), progress=progress)
                facts = {"files": len(made.files), "bytes": made.num_bytes, "xxh3": made.digest}
                results.append({**facts, "took_s": time.monotonic() - began, "new_bytes_s": made.new_bytes})
            except HarnessError as error:
                results.append(error)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                results.append(HarnessError(what, where=path, fix="copy it by hand on this node to see more"))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() - last < timeout_s:
            thread.join(0.2)
        if not results:
            raise HarnessError(
                f"no byte came for {timeout_s:g} s",
                where=path,
                fix="the file system or the disk of the node hangs; or another job copies the same there",
            )
        if isinstance(results[0], HarnessError):
            raise results[0]
        return results[0]

    return copy


def known_hashes(path: str) -> dict[str, str]:
    """Return the hashes that the files of a dataset or of weights must have, as far as they are written down there."""
    if not Path(path).is_dir():
        return {}
    listed = read_checksums(Path(path))
    if listed is not None:
        return {file.path: file.xxh3 for file in listed}
    return dict(_of_dataset(Path(path)))


def _of_dataset(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        data = open_datasets(DataConfig(path=str(folder)))
    except (FormatError, OSError):
        return  # weights, or files of another tool
    for reader in (*data.sources, data.validation):
        if isinstance(reader, PackReader) and reader.manifest is not None:
            below = Path(reader.path).relative_to(folder)
            files = [*reader.manifest.index, *(file for shard in reader.manifest.shards for file in shard.files)]
            yield from ((str(below / file.path), file.xxh3) for file in files)
