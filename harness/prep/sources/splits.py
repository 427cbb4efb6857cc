"""Splits of a dataset, recognized by the names of files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from harness.errors import PrepError

TRAIN = "train"
_SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# As in `train-00000-of-00005-1a2b3c.parquet`.
_PART = re.compile(r"(.+?)[-_.]\d+-of-\d+.*")


def split_of(name: str, *, loosely: bool = False) -> str | None:
    """Return the split that a file's name, or one of the folders that it is in, stands for; None if none.

    Args:
        name: path in the dataset.
        loosely: the split's name may be a part of the file's: `train_sft-00000-of-00002.parquet`, `chat-test.jsonl`.
    """
    path = PurePosixPath(name.lower())
    stem = path.name.partition(".")[0]
    part = _PART.fullmatch(path.name)
    stem = part[1] if part else stem
    if stem in _SPLITS:
        return _SPLITS[stem]
    if loosely:
        words = [word for word in re.split(r"[-_ ]", stem) if word in _SPLITS]
        if words:
            # Of numbered parts the whole name is the split's: train_sft and train_gen are two.
            return stem if part else _SPLITS[words[0]]
    folders = [_SPLITS[folder] for folder in path.parts[:-1] if folder in _SPLITS]
    return folders[-1] if folders else None


def choose_split(names: Sequence[str], split: str, *, where: str, loosely: bool = False) -> tuple[list[str], str]:
    """Return the names that belong to a split, and its name.

    Args:
        names: files of a dataset.
        split: empty chooses `train` among several, or the only one.
        loosely: as in `split_of`.

    Raises:
        PrepError: there is no such split, or it is ambiguous which one to read.
    """
    splits: dict[str | None, list[str]] = {}
    for name in names:
        splits.setdefault(split_of(name, loosely=loosely), []).append(name)
    known = sorted(name for name in splits if name is not None)
    if split:
        wanted = split if split in splits else _SPLITS.get(split.lower(), split)
        if wanted not in splits:
            what = f"there is no split {split!r}" + (f", only {', '.join(known)}" if known else ": no file is named so")
            raise PrepError(what, where=where, fix="change source.split, or name the files with a glob")
        return splits[wanted], wanted
    if not known:
        return list(names), ""
    if len(splits) == 1:
        return list(names), known[0]
    if TRAIN not in splits:
        what = f"the dataset has several splits: {', '.join(known)}"
        raise PrepError(what, where=where, fix=f"name one, such as source.split={known[0]}")
    return splits[TRAIN], TRAIN
