"""Recognize paths of the wrong kind: a run, a dataset, a folder of these, or a file of chats."""

from __future__ import annotations

import difflib
import re
import shlex
from itertools import islice
from pathlib import Path

from harness.errors import ConfigError

_CHATS = (".csv", ".tsv", ".txt", ".json", ".jsonl")
# Subfolders of a prepared folder, each with a dataset.
_SPLITS = ("train", "validation", "test")
_MOST_NAMES = 4
# Entries of a folder to examine; a folder on a network file system may have a million files.
_MOST_ENTRIES = 1000


def is_there(path: Path) -> bool:
    """Return True if a path exists; False also for text that cannot be a path, such as an overlong one."""
    try:
        return path.exists()
    except OSError:
        return False


def near_paths(path: Path) -> str:
    """Return a fix that suggests existing paths with names similar to a missing one; empty if there are none."""
    try:
        entries = [entry.name for entry in islice(path.parent.iterdir(), _MOST_ENTRIES)]
    except OSError:
        return ""
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, entries, n=2)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def is_run(path: Path) -> bool:
    """Return True for the folder of a training run."""
    has_trained = any(is_there(path / name) for name in ("metrics.jsonl", "checkpoints", "identity.json"))
    return has_trained and is_there(path / "config.yaml")


def numbered_runs(runs: Path, name: str) -> dict[int, Path]:
    """Return the folders `<runs>/<name>-NNN` by number; raise ConfigError for an invalid folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        what = f"{name!r} is not a valid name for a run's folder"
        raise ConfigError(what, where="name", fix="use letters, digits, dots, dashes and underscores")
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    paths = runs.iterdir() if runs.is_dir() else ()
    return {int(match[1]): path for path in paths if (match := pattern.fullmatch(path.name))}


def is_dataset(path: Path) -> bool:
    """Return True for a dataset or for a folder with the splits that `harness prepare` writes."""
    return any(is_there(path / name / "manifest.json") for name in ("", *_SPLITS))


def explain_path(path: Path, *, expected: str) -> tuple[str, str] | None:
    """Return the error and the fix for a path of another kind than expected; None if it is not recognized.

    `expected` completes "..., not", such as `a dataset`.
    """
    quoted = shlex.quote(str(path))
    if not is_there(path):
        return None
    if (path / "adapter_config.json").is_file():
        fix = "merge it into its base model with PEFT's merge_and_unload, and specify the folder of the result"
        return f"a LoRA adapter, not {expected}", fix
    if path.suffix.lower() == ".gguf" or (path.is_dir() and next(path.glob("*.gguf"), None) is not None):
        fix = "specify the folder that it was made from, with config.json and *.safetensors"
        return f"a GGUF model for llama.cpp, not {expected}", fix
    if is_run(path):
        fix = f"`harness status {quoted}` shows the run, `harness compare {quoted} OTHER` compares it with another"
        if "model" in expected:
            fix = f"`harness export {quoted} FOLDER` writes its model; specify FOLDER"
        return f"a run's folder, not {expected}", fix
    if path.is_dir():
        entries = sorted(entry for entry in islice(path.iterdir(), _MOST_ENTRIES) if entry.is_dir())
        # `harness sft` puts a run and its dataset in one folder.
        entries += [entry / name for entry in entries for name in ("run", "data")]
        kinds = (("run", is_run, "status"), ("dataset", is_dataset, "inspect"))
        for kind, belongs, command in sorted(kinds, key=lambda kind: kind[0] not in expected):
            if found := [str(entry) for entry in entries if belongs(entry)]:
                shown = ", ".join(found[:_MOST_NAMES]) + (", ..." if len(found) > _MOST_NAMES else "")
                is_kind = kind in expected
                one = f"`harness {command} {found[0]}` shows one of them"
                fix = f"specify one of them: {shown}" if is_kind else one
                itself = " itself" if is_kind else ""
                return f"a folder of {len(found):,} {kind}{'s' * (len(found) > 1)}, not {expected}{itself}", fix
    if (path / "manifest.json").is_file():
        return f"a dataset, not {expected}", f"`harness inspect {quoted}` shows it"
    if (path / "config.json").is_file():
        return f"a model's folder, not {expected}", f"model.init_from={quoted} trains it"
    if path.suffix.lower() in _CHATS:
        return f"a {path.suffix} file, not {expected}", how_to_pack(path)
    return None


def how_to_pack(path: Path) -> str:
    """Explain how to pack the conversations of a file, or the lines of a plain text file."""
    quoted = shlex.quote(str(path))
    if path.suffix.lower() == ".txt" and path.is_file():
        with path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                return text_to_records(quoted)
    return f"`harness prepare source.path={quoted} data.path=data/{shlex.quote(path.stem)}` packs its conversations"


def text_to_records(path: str) -> str:
    """Explain how to train on a plain text file; `path` is quoted for a shell."""
    lines = re.sub(r"\.\w+('?)$", r".jsonl\1", path)
    to_lines = f"jq -cR '{{text: .}}' {path} > {lines}"
    return f"each line as a text to train on: {to_lines}; chats need one JSON record per line"


def suggest_recipe(name: str) -> str:
    """Return the start of a fix if a path was given instead of a recipe or an experiment; otherwise empty."""
    path = Path(name)
    if is_dataset(path):
        return f"did you mean sft data.path={shlex.quote(name)}? "
    explained = explain_path(path, expected="a recipe")
    return f"{explained[1]}; " if explained else ""
