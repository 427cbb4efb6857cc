"""Select the files and splits of datasets by name, and read datasets of the Hugging Face hub through its cache.

HF_ENDPOINT, HF_HOME and HF_TOKEN work as with Hugging Face's own tools. huggingface_hub is imported when it is used.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from harness.errors import ConfigError, HarnessError, PrepError
from harness.prep.sources.reading import SUFFIXES, SourceFiles
from harness.prep.sources.text import COMPRESSED
from harness.printing import count_of
from harness.storage import natural_key, stamp_of
from harness.storage.inputs import glob_pattern

TRAIN = "train"
_SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Files written by `save_to_disk` of Hugging Face's datasets, for several splits and for one.
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
# Descriptions next to data that are also JSON files.
DESCRIPTIONS = (SPLITS_FILE, STATE_FILE, "dataset_info.json", "dataset_infos.json")
# As in `train-00000-of-00005-1a2b3c.parquet`.
_PART = re.compile(r"(.+?)[-_.]\d+-of-\d+.*")
_SCHEME = "hf://"
_NAME = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"(?:@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+))?"
_URI = re.compile(rf"hf://datasets/(?P<name>{_NAME}(?:/{_NAME})?){_REVISION}(?:/(?P<inner>.*))?")
_ID = re.compile(rf"(?P<name>{_NAME}/{_NAME}){_REVISION}(?P<inner>)")
# Timeouts for the list of files, and for the metadata of one file.
_LISTING_S, _ANSWER_S = 60, 10
_FIX_OFFLINE = "download it where there is a network (`hf download NAME --repo-type dataset --local-dir DIR`), "
_FIX_OFFLINE += "and set source.path to the folder"


@dataclass(frozen=True)
class HubName:
    """A dataset of the hub, `ORG/NAME`, or a part of it.

    `revision` is a branch, tag or commit, empty for the newest; `inner` is a file, folder, glob or split, empty for
    all. `is_id` is true if the name was given without `hf://`, and may have been meant as a local path.
    """

    name: str
    revision: str = ""
    inner: str = ""
    is_id: bool = False

    def __str__(self) -> str:
        revision, inner = f"@{self.revision}" * bool(self.revision), f"/{self.inner}" * bool(self.inner)
        return f"{'' if self.is_id else 'hf://datasets/'}{self.name}{revision}{inner}"


def parse_name(path: str) -> HubName | None:
    """Return the hub dataset that a path names; None for any other path.

    `ORG/NAME` names a dataset if neither that path nor a folder `ORG` exists locally.
    """
    if path.startswith(_SCHEME):
        match = _URI.fullmatch(path)
        if match is None or glob.has_magic(match["name"]):
            fix = "use hf://datasets/ORG/NAME, optionally followed by a file, a folder or a glob"
            raise ConfigError("not a dataset address of the hub", where=path, fix=fix)
    else:
        match = _ID.fullmatch(path)
        if match is None or Path(path).exists() or Path(path).parts[0] in (".", "..") or Path(path).parent.exists():
            return None
        if re.search(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md|gz|zst|bz2|xz|zip)$", path.lower()):
            return None
    inner = (match["inner"] or "").strip("/")
    return HubName(match["name"], unquote(match["revision"] or ""), inner, not path.startswith(_SCHEME))


def fetch(place: HubName, *, split: str, subset: str, show: Callable[[str], None]) -> SourceFiles:
    """Choose the data files of one split, and download those that are not in the cache.

    Raises PrepError if the dataset does not exist, the hub cannot be reached, or the selection is ambiguous, and
    ConfigError if huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from tqdm import tqdm
    except ImportError as error:
        what = "there is no such local path, and " * place.is_id + f"{error.name} is not installed"
        fix = "check the path, or pip install 'megatron-sft-harness[tokenize]'"
        raise ConfigError(what, where=str(place), fix=fix) from error
    # huggingface_hub reads HF_ENDPOINT on its first import, which may have been before the variable was set.
    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    with _errors(place):
        revision = place.revision or None
        info = api.dataset_info(place.name, revision=revision, files_metadata=True, timeout=_LISTING_S)
        revision, sizes = str(info.sha), {one.rfilename: int(one.size or 0) for one in info.siblings or ()}
    suffixes = tuple(suffix + packed for suffix in SUFFIXES for packed in ("", *COMPRESSED))
    if not (data := data_files(sizes, suffixes)):
        fix = f"try hf://datasets/{place.name}@refs/convert/parquet, the hub's own Parquet conversion"
        raise PrepError(f"the dataset has no files that end in {' '.join(sorted(suffixes))}", where=str(place), fix=fix)
    chosen, named = _choose(place, data, info, split, subset)
    kinds = sorted({PurePosixPath(name).suffix.lower() for name in chosen})
    if len(kinds) > 1:
        what = f"the files are of several kinds ({' '.join(kinds)}), which may contain the same records twice"
        raise PrepError(what, where=str(place), fix=f"select one kind: hf://datasets/{place.name}/**/*{kinds[0]}")
    total = sum(sizes[name] for name in chosen)
    parts = "".join(f", {key} {named[key]}" for key in ("subset", "split") if key in named)
    size = f"{count_of(len(chosen), 'file')}, {total / 1e6:,.1f} MB"
    show(f"dataset {place.name} of the hub at {revision[:12]}{parts}: {size}")
    # No progress bars: files are announced by `show`.
    settings: dict[str, Any] = {
        "endpoint": api.endpoint,
        "etag_timeout": _ANSWER_S,
        "tqdm_class": partial(tqdm, disable=True),
    }
    paths = []
    for name in chosen:
        with _errors(place, name):
            file = huggingface_hub.hf_hub_download(place.name, name, repo_type="dataset", revision=revision, **settings)
            paths.append(Path(file))
    facts = {"dataset": place.name, "revision": revision, **named}
    unread = tuple(f"hf://datasets/{place.name}/{name}" for name in data if name not in set(chosen))
    return SourceFiles(tuple(paths), tuple(map(stamp_of, paths)), unread, facts, tuple(chosen))


def _choose(place: HubName, data: list[str], info: Any, split: str, subset: str) -> tuple[list[str], dict[str, str]]:
    """Return the files to read, and their subset and split if there are several.

    The address selects the files, or else a split does: a split of a subset in the dataset's card, or by file names.
    """
    where, inner, below, config = str(place), place.inner, data, None
    facts: dict[str, str] = {}
    if inner:
        pattern = glob_pattern(inner)
        if matching := [name for name in data if (pattern.fullmatch(name) if glob.has_magic(inner) else name == inner)]:
            return matching, {}
        below = [name for name in data if name.startswith(f"{inner}/")]
    if not below and (glob.has_magic(inner) or "/" in inner or "." in inner or (split and split != inner)):
        what = f"no file of the dataset matches {inner}; there are {', '.join(data[:5])}"
        raise PrepError(what + (", ..." if len(data) > 5 else ""), where=where, fix="check the address")
    if not inner or not below:
        split, below = inner or split, data  # an address that no file matches ends with a split
        config, facts = _config_of(info, subset, where)
    if config is not None:
        chosen, named = choose_named(_card_splits(config, data), split, where=where)
        return chosen, facts | {"split": named}
    chosen, named = choose_split(below, split, where=where, loosely=True)
    return chosen, {"split": named} if named else {}


def _config_of(info: Any, subset: str, where: str) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """Return a subset in the dataset's card (None if it defines none), and its name if there are several."""
    card = getattr(info, "card_data", None)
    listed = card.get("configs") if card is not None else None
    configs = [one for one in listed or [] if isinstance(one, dict) and "config_name" in one]
    configs = [one for one in configs if "data_files" in one or "data_dir" in one]
    if not configs and subset:
        fix = "omit source.subset, or specify a folder"
        raise PrepError("the dataset's card defines no subsets", where=where, fix=fix)
    if not configs:
        return None, {}
    names = [str(one["config_name"]) for one in configs]
    if subset and subset not in names:
        what = f"subset {subset!r} does not exist, only {', '.join(names)}"
        raise PrepError(what, where=where, fix="change source.subset")
    defaults = [one for one in configs if one.get("default") or one["config_name"] == "default"]
    if len(configs) > 1 and not defaults and not subset:
        what = f"the dataset has the subsets {', '.join(names)}"
        raise PrepError(what, where=where, fix=f"select one, such as source.subset={names[0]}")
    config = configs[names.index(subset)] if subset else [*defaults, *configs][0]
    return config, {"subset": str(config["config_name"])} if len(configs) > 1 else {}


def _card_splits(config: Mapping[str, Any], data: Sequence[str]) -> dict[str, list[str]]:
    folder = str(config.get("data_dir") or "").strip("/")
    entries = config.get("data_files") or f"{folder}/**"
    if isinstance(entries, str) or (isinstance(entries, list) and all(isinstance(one, str) for one in entries)):
        matching = _matching(entries, folder if "data_files" in config else "", data)
        splits: dict[str, list[str]] = {}
        for name in matching:
            splits.setdefault(split_of(name, loosely=True) or "train", []).append(name)
        return splits
    pairs = entries.items() if isinstance(entries, dict) else [(one.get("split"), one.get("path")) for one in entries]
    named: dict[str, list[Any]] = {}
    for name, path in pairs:  # a split may be listed several times
        named.setdefault(str(name or "train"), []).extend(path if isinstance(path, list) else [path])
    return {name: _matching(paths, folder, data) for name, paths in named.items()}


def _matching(patterns: Any, folder: str, data: Sequence[str]) -> list[str]:
    listed = [str(one).removeprefix("./") for one in (patterns if isinstance(patterns, list) else [patterns])]
    expressions = [glob_pattern(f"{folder}/{one}" if folder else one) for one in listed]
    return [name for name in data if any(one.fullmatch(name) for one in expressions)]


@contextlib.contextmanager
def _errors(place: HubName, file: str = "") -> Iterator[None]:
    """Convert the errors of huggingface_hub, and of the network below it, to PrepError."""
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        from huggingface_hub import errors

        local = "there is no such local path, and " if place.is_id else ""
        if isinstance(error, errors.GatedRepoError):
            what, fix = "the hub requires consent to the dataset's terms", "accept them on its page, and set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            what, fix = f"the dataset has no revision {place.revision!r}", "specify a branch, a tag or a commit"
        elif isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            what = f"{local}the hub has no dataset {place.name}"
            fix = "check the path; a private dataset requires HF_TOKEN"
        elif isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            what, fix = "the hub has no such file", "try again: the dataset may have changed"
        elif isinstance(error, OSError) and error.filename and error.errno:
            what = f"the cache cannot be written: {error.strerror}"
            fix = "free disk space, or set HF_HOME to another folder"
        else:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            what, fix = f"{local}the hub cannot be reached: {reason[:200]}", _FIX_OFFLINE.replace("NAME", place.name)
            fix = f"check the path; if a dataset of the hub is meant, {fix}" if local else fix
        raise PrepError(what, where=f"{place}/{file}" if file else str(place), fix=fix) from error


def data_files(names: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the names of data files by their suffixes, in natural order, without hidden files and descriptions."""
    return [
        name
        for name in sorted(names, key=natural_key)
        if name.lower().endswith(suffixes)
        and PurePosixPath(name).name not in DESCRIPTIONS
        # As in Spark, `_SUCCESS` and similar files are not data.
        and not any(part[0] in "._" for part in PurePosixPath(name).parts)
    ]


def split_of(name: str, *, loosely: bool = False) -> str | None:
    """Return the split indicated by a file's name or by one of its folders; None if there is none.

    If `loosely`, the split may be a part of the file's name: `train_sft-00000-of-00002.parquet`, `chat-test.jsonl`.
    """
    path = PurePosixPath(name.lower())
    part = _PART.fullmatch(path.name)
    stem = part[1] if part else path.name.partition(".")[0]
    if stem in _SPLITS:
        return _SPLITS[stem]
    if loosely and (words := [word for word in re.split(r"[-_ ]", stem) if word in _SPLITS]):
        # For numbered parts, the whole name is the split: train_sft and train_gen are two splits.
        return stem if part else _SPLITS[words[0]]
    return next((_SPLITS[folder] for folder in reversed(path.parts[:-1]) if folder in _SPLITS), None)


def choose_split(names: Sequence[str], split: str, *, where: str, loosely: bool = False) -> tuple[list[str], str]:
    """Return the files of a split, and its name; an empty split selects `train`, or the only split that exists."""
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(split_of(name, loosely=loosely) or "", []).append(name)
    # Files without a split are read if no file has one.
    if not split and len(splits) == 1:
        return list(names), next(iter(splits))
    named = {name: splits[name] for name in sorted(splits) if name}
    # Next to files without a split, the only named split may be one that must not be trained on.
    wanted = split or (TRAIN if len(named) == 1 else "")
    other = _SPLITS.get(wanted.lower(), "")
    return choose_named(named, other if wanted not in named and other in named else wanted, where=where)


def choose_named(splits: Mapping[str, list[str]], split: str, *, where: str) -> tuple[list[str], str]:
    """Return the files of one of several splits, and its name; raise PrepError if it is missing or ambiguous."""
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
