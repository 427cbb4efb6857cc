"""The folder of one preparation: detect finished, interrupted and foreign folders, and guard the one being written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, HarnessError, PrepError, os_errors_as
from harness.settings import flatten, load
from harness.storage import BucketFolder, Folder, Marker, make_folder, sync_path, write_atomically
from harness.storage.files import sync_tree

TRAIN, VALIDATION, TEST = "train", "validation", "test"
TOKENIZER, SOURCE = "tokenizer", "source"
# Refused records with their reasons, and the same records alone, one per line, to be repaired and prepared again.
BAD_RECORDS, TO_REPAIR = "bad_records.jsonl", "bad_records_to_repair.jsonl"
# Kept after a failed preparation, for its finished shards.
SHARDS = ".shards"
_FIRST_DAY = "first_day"
SEQUENCES = "sequences"
REPORT, REPORT_PAGE, SAMPLES_PAGE = "report.json", "report.md", "report.html"
_MARKER = "_preparing"
_MAX_REPORT_BYTES = 1 << 28
# Removed in this order; the report is first because a folder with a report counts as finished.
_OWNED: tuple[str, ...] = (REPORT, REPORT_PAGE, SAMPLES_PAGE, TRAIN, VALIDATION, TEST)
_OWNED += (TOKENIZER, SOURCE, BAD_RECORDS, TO_REPAIR, SEQUENCES)


def settings_hash(settings: dict[str, Any]) -> str:
    """Return a hash of settings as 16 hex digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def finished_report(folder: Folder, settings: dict[str, Any], *, overwrite: bool) -> dict[str, Any] | None:
    """Return the report of an earlier run with the same settings, or None if there is work to do.

    Removes the leftovers of a run that was killed after writing its report. `overwrite` repeats a run with media, whose
    files are not part of the settings. Raises ConfigError if the destination is a file, or a run with other settings
    wrote the folder and `overwrite` is not set, and PrepError if the folder contains anything else.
    """
    where = folder.where()
    if isinstance(folder.place, Path) and folder.place.exists() and not folder.place.is_dir():
        raise ConfigError("the destination is a file", where=where, fix="set data.path to a folder")
    data = None
    with suppress(OSError):
        data = folder.read(REPORT, _MAX_REPORT_BYTES)
    if data is None:
        others = sorted(folder.names()) if not isinstance(folder.place, Path) or folder.place.exists() else []
        if others and _MARKER not in others:
            what = f"the folder contains other files, such as {others[0]}"
            raise PrepError(what, where=where, fix="set data.path to a new or empty folder")
        return None
    what, at = "the report was not written by a preparation", folder.where(REPORT)
    fix = "set data.path to another folder, or remove this one"
    report = load(dict[str, Any], data, where=at, fix=fix, what=what, error=PrepError)
    old, splits = report.get("settings", {}), report.get("splits", {})
    if "settings_hash" not in report or not isinstance(old, dict) or not isinstance(splits, dict):
        raise PrepError(what, where=at, fix=fix)
    if "date" in old:
        # A dataset prepared on another day is still the same dataset.
        settings = {**settings, "date": old["date"]}
    if report.get("settings_hash") == settings_hash(settings):
        complete = all(folder.exists(f"{name}/manifest.json") for name in splits)
        is_repeated = overwrite and report.get("media_by_kind")
        if not complete or TOKENIZER not in folder.names() or is_repeated:
            return None
        if isinstance(folder.place, Path):
            PreparedFolder(folder.place).finish_again()
        return report
    if overwrite:
        return None
    old, new = flatten(old), flatten(settings)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    shown = [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in changed[:4]]
    shown += [f"and {len(changed) - 4} more"] if len(changed) > 4 else []
    what = f"the folder was prepared with other settings: {'; '.join(shown)}"
    raise ConfigError(what, where=where, fix="replace it with data.overwrite=true, or use another folder")


def upload(
    prepared: Path, folder: BucketFolder, settings: dict[str, Any], advance: Callable[..., None], *, overwrite: bool
) -> int:
    """Upload a finished preparation: each dataset's manifest after its shards, the report last.

    Complete files from an interrupted upload are not sent again, and nothing is sent if another process has finished
    the same preparation. Files of an earlier preparation are removed, its report and manifests first. `advance`
    receives the bytes of each file, with `is_earlier` true if the file already existed. Returns the bytes sent. Raises
    FormatError while another process uploads, and ConfigError if one has finished with other settings.
    """
    paths = {path.relative_to(prepared).as_posix(): path for path in prepared.rglob("*") if path.is_file()}
    names = [name for name in paths if name.split("/")[0] in _OWNED and name != REPORT]
    names.sort(key=lambda name: (name.endswith("/manifest.json"), name))
    marker = folder.lock(_MARKER)
    marker.acquire()
    is_whole = False
    try:
        sent = 0
        if finished_report(folder, settings, overwrite=overwrite) is None:
            folder.remove(REPORT)
            stored = [name for name in folder.files() if name.split("/")[0] in _OWNED]
            manifests = [name for name in stored if name.endswith("/manifest.json")]
            for name in (*manifests, *(other for other in stored if other not in paths and other not in manifests)):
                folder.remove(name)
            for name in [*names, REPORT]:
                num_bytes = paths[name].stat().st_size
                is_sent = folder.upload(name, paths[name])
                sent += num_bytes * is_sent
                advance(num_bytes, is_earlier=not is_sent)
        is_whole = True
        return sent
    finally:
        marker.release(remove=is_whole)


class PreparedFolder:
    """Guard of the local folder that a preparation writes.

    `report.json` is written last: a folder without it is not finished. While a preparation runs, and after an
    interruption, a marker file shows that the contents may be replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marker = Marker(path / _MARKER)

    def begin(self) -> None:
        """Lock the folder and remove an earlier run's output except its shards; FormatError if it is in use."""
        fix = "set data.path to a writable folder"
        with os_errors_as(ConfigError, "the folder cannot be created", where=self.path, fix=fix):
            make_folder(self.path)
        self._marker.acquire()
        for name in _OWNED:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def first_day(self, today: date) -> date:
        """Return the date when the preparation began: `today`, unless it continues an interrupted one.

        A chat template may write the date; a preparation that takes several days must write the same date throughout.
        """
        file = self.path / SHARDS / _FIRST_DAY
        with suppress(OSError, ValueError):
            return date.fromisoformat(file.read_text())
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, today.isoformat().encode())
        return today

    def finish(self, report: dict[str, Any]) -> None:
        """Force all files to disk and write the report, which makes the folder finished."""
        try:
            for name in (TOKENIZER, SOURCE, BAD_RECORDS, TO_REPAIR):  # other files are synced as they are written
                if (self.path / name).exists():
                    sync_tree(self.path / name)
            write_atomically(self.path / REPORT, (json.dumps(report, indent=2) + "\n").encode())
        except OSError:
            with suppress(OSError):  # it may be in place, yet be lost in a power failure
                (self.path / REPORT).unlink()
            raise
        self._tidy()
        sync_path(self.path)

    def _tidy(self) -> None:
        shutil.rmtree(self.path / SHARDS, ignore_errors=True)
        self._marker.release(remove=True)

    def finish_again(self) -> None:
        """Remove the leftovers of a run that ended after its report, unless the folder is in use or not writable."""
        if (self.path / SHARDS).exists() or (self.path / _MARKER).exists():
            with suppress(OSError, HarnessError):
                self._marker.acquire()
                self._tidy()

    def abandon(self) -> None:
        """Unlock the folder after a failure; the next run takes over."""
        self._marker.release(remove=False)
