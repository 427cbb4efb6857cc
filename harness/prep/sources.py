"""Where conversations come from: which files a path names."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from harness.checks import require_at_least, require_choice
from harness.errors import ConfigError, PrepError
from harness.storage import natural_key

SOURCE_KINDS = ("files", "pydoc")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
# As `save_to_disk` of Hugging Face's datasets writes them.
ARROW_SUFFIXES = (".arrow",)
# Of JSONL, and what pyarrow calls their codecs.
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_UNREAD_SUFFIXES = (".xz", ".zip", ".7z", ".lz4")
_SPLITS_FILE = "dataset_dict.json"


@dataclass
class SourceConfig:
    """Where chat records are read.

    Attributes:
        kind: `files`, or `pydoc` for the corpus built from the documentation of Python's standard library.
        path: a file, a glob or a folder (searched with all below it); not used by `pydoc`.
        on_bad: `refuse` stops at bad records and lists them, `skip` leaves them out and counts them.
        limit: read so many records at most; 0 reads all.
        shard_bytes: of the source are tokenised in one go, and again after an interruption in it; the result is the
            same whatever it is.
    """

    kind: str = "pydoc"
    path: str = ""
    on_bad: str = "refuse"
    limit: int = 0
    shard_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        require_choice(self.kind, SOURCE_KINDS, setting="source.kind")
        require_choice(self.on_bad, ("refuse", "skip"), setting="source.on_bad")
        require_at_least(self.limit, 0, setting="source.limit")
        require_at_least(self.shard_bytes, 1, setting="source.shard_bytes")
        if self.kind == "files" and not self.path:
            raise ConfigError(
                "no path is given", where="source.path", fix="name a JSONL or Parquet file, a glob or a folder"
            )


def list_files(path: str) -> list[Path]:
    """The files that `path` names, folders and globs in natural order (`part-2` before `part-10`).

    Raises:
        PrepError: nothing is there, a file is of a kind that is not read, or a folder holds several splits.
    """
    found = Path(path)
    if found.is_dir():
        _require_one_split(found)
        kinds = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *ARROW_SUFFIXES, *COMPRESSED, *_UNREAD_SUFFIXES)
        files = [file for file in _visible_files(found) if file.suffix.lower() in kinds]
    elif found.is_file():
        files = [found]
    else:
        names = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise PrepError(
            "no chat files were found",
            where=path,
            fix="name a file, a glob or a folder with files that end in "
            + " ".join(JSONL_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES)
            + f", JSONL also with {' '.join(COMPRESSED)} behind it",
        )
    for file in files:
        inner = Path(file.stem).suffix.lower() if file.suffix.lower() in COMPRESSED else ".jsonl"
        if file.suffix.lower() in _UNREAD_SUFFIXES or inner not in (*JSONL_SUFFIXES, ".json", ""):
            raise PrepError("files compressed in this way are not read", where=str(file), fix="decompress it first")
    return sorted(files, key=lambda file: (natural_key(str(file)), str(file)))


def files_left_out(path: str) -> list[Path]:
    """Files below the folder `path` that `list_files` does not read: of another kind, or in Spark's way of hiding."""
    folder = Path(path)
    if not folder.is_dir():
        return []
    read = set(list_files(path))
    return sorted(file for file in folder.rglob("*") if file.is_file() and file not in read)


def _require_one_split(folder: Path) -> None:
    marks = sorted(folder.rglob(_SPLITS_FILE))
    if marks:
        splits = sorted(entry.name for entry in marks[0].parent.iterdir() if entry.is_dir())
        raise PrepError(
            f"the folder holds the splits {', '.join(splits)} of a dataset",
            where=str(marks[0].parent),
            fix="name the folder of one of them: what is kept for tests is not for training",
        )


def _visible_files(folder: Path) -> list[Path]:
    """All files but those with a dot or an underscore (`_SUCCESS`, `_temporary`) before a name below `folder`."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return [file for file in found if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)]
