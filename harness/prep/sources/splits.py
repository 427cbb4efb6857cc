"""Data files of a dataset and their splits, recognized by the names of files and folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from harness.errors import PrepError
from harness.storage import natural_key

TRAIN = "train"
_SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Written by `save_to_disk` of Hugging Face's datasets: of several splits, and of one.
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
# Descriptions beside data, which are JSON themselves.
DESCRIPTIONS = (SPLITS_FILE, STATE_FILE, "dataset_info.json", "dataset_infos.json")
# As in `train-00000-of-00005-1a2b3c.parquet`.
_PART = re.compile(r"(.+?)[-_.]\d+-of-\d+.*")


def data_files(names: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the names of data files by their suffixes, in natural order, without hidden files and descriptions."""
    return [
        name
        for name in sorted(names, key=natural_key)
        if name.lower().endswith(suffixes)
        and PurePosixPath(name).name not in DESCRIPTIONS
        # As Spark does: `_SUCCESS` and the like are not data.
        and not any(part[0] in "._" for part in PurePosixPath(name).parts)
    ]


def split_of(name: str, *, loosely: bool = False) -> str | None:
    """Return the split that a file's name, or one of the folders that it is in, stands for; None if none.

    If `loosely`, the split's name may be a part of the file's: `train_sft-00000-of-00002.parquet`, `chat-test.jsonl`.
    """
    path = PurePosixPath(name.lower())
    part = _PART.fullmatch(path.name)
    stem = part[1] if part else path.name.partition(".")[0]
    if stem in _SPLITS:
        return _SPLITS[stem]
    if loosely and (words := [word for word in re.split(r"[-_ ]", stem) if word in _SPLITS]):
        # Of numbered parts the whole name is the split's: train_sft and train_gen are two.
        return stem if part else _SPLITS[words[0]]
    return next((_SPLITS[folder] for folder in reversed(path.parts[:-1]) if folder in _SPLITS), None)


def choose_split(names: Sequence[str], split: str, *, where: str, loosely: bool = False) -> tuple[list[str], str]:
    """Return the names of a split, and its name; an empty split chooses `train`, or the only one that there is."""
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(split_of(name, loosely=loosely) or "", []).append(name)
    # Files without a split are read where no file has one.
    if not split and len(splits) == 1:
        return list(names), next(iter(splits))
    named = {name: splits[name] for name in sorted(splits) if name}
    # Beside files without a split, the only other one may be what must not be trained on.
    wanted = split or (TRAIN if len(named) == 1 else "")
    other = _SPLITS.get(wanted.lower(), "")
    return choose_named(named, other if wanted not in named and other in named else wanted, where=where)


def choose_named(splits: Mapping[str, list[str]], split: str, *, where: str) -> tuple[list[str], str]:
    """Return the files of one of several splits, and its name; raises PrepError as `choose_split` does."""
    found = {name: files for name, files in splits.items() if files}
    known = ", ".join(found)
    wanted = split or (next(iter(found)) if len(found) == 1 else TRAIN)
    if wanted in found:
        return found[wanted], wanted
    if split:
        what = f"split {split!r} does not exist" + (f", only {known}" if known else ": no file has this name")
        fix = "change source.split, or select the files with a glob"
    elif not found:
        what, fix = "the dataset's card lists no supported files", "specify a file, a folder or a glob in it"
    else:
        what, fix = f"the dataset has several splits: {known}", f"select one, such as source.split={next(iter(found))}"
    raise PrepError(what, where=where, fix=fix)
