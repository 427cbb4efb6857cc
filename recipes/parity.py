"""Prove that other settings give the same losses: train with each, and compare with a reference run.

    harness parity                      # every format, compared with legacy npy
    harness parity check=workers        # or layouts, schedules, versions, isolation, reference, all

Compares data (digests of every global batch), losses, gradient norms and counts, and prints the first difference.
`check=isolation` shows for each layout that sequences of a packed row do not attend to each other, and
`check=reference` that each model family trains like plain transformers on unpacked conversations. Writes report.json,
report.html and junit.xml. The exit code is 1 if runs differ, and 2 if the comparison failed. To continue after an
interruption, run the command again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.checks import LONGEST_S, CheckedSettings, bounded, one_of, require_choice, usable_cores
from harness.config import hydra_entry
from harness.errors import ConfigError, os_errors_as
from harness.formats import FORMATS, convert_dataset
from harness.parity import ParityReport, Tolerances, command_line
from harness.parity.assemble import cell_result, environment
from harness.parity.cells import (
    FORMAT,
    ISOLATION,
    ISOLATION_TURNS,
    KIND,
    REFERENCE,
    VERSION,
    Cell,
    CheckPlan,
    parse_case,
    plan_check,
)
from harness.parity.compare import IDENTICAL, OTHER_KERNELS
from harness.parity.made_data import make_dataset
from harness.parity.pages import publish
from harness.parity.result import CellResult
from harness.parity.running import log_cells, run_cells
from harness.plan import FAMILIES, read_hf_config
from harness.plan.encoders import MEDIA_MODELS
from harness.printing import open_console
from harness.storage import is_uri

_BY_KIND = ("context", "experts", "hybrid", "media")
CHECKS = ("formats", "workers", "schedules", "layouts", *_BY_KIND, "isolation", "reference", "versions")
# Settings that each cell has of its own, and what sets them for all of them.
_DATA_FIX = "dataset=PATH for all cells, datasets='[\"FORMAT=PATH\"]' for those of a format"
_OWN_SETTINGS = {
    **dict.fromkeys(("data", "data.path", "data.blend", "data.validation_path"), _DATA_FIX),
    **dict.fromkeys(("trainer.steps", "optimizer.decay_steps"), "steps=NUMBER"),
    "run_dir": "folder=DIR",
}
# Versions of cases: that of the interpreter that runs the matrix, and plain transformers.
THIS, _PLAIN = "this", "transformers"


@dataclass
class ParityConfig(CheckedSettings):
    """A matrix of runs to compare.

    Attributes:
        check: formats, workers, schedules, layouts, context, experts, hybrid, media, isolation, reference or versions,
            several as `formats+workers`, or all.
        dataset: dataset with `train` and `validation`; null generates a small one.
        datasets: existing datasets as `NAME=PATH`, for `format=NAME`. Other formats are converted from `dataset`.
        versions: Python interpreters as `NAME=PATH`, whose environments contain other versions of the libraries.
        folder: folder for the runs and the report.
        fresh: repeat cells that are complete.
        steps: number of steps per run.
        steps_before: number of steps before the checkpoint that all layouts start from, so that the optimizer state is
            compared too.
        slots: number of ranks to run at the same time; null uses the number of cores.
        timeout_s: time limit of one cell in seconds.
        max_ranks: maximum number of ranks; larger cases are omitted.
        device: device of all runs, cpu or cuda; tolerances depend on it.
        keep_batches: record the data in addition to its digests, so that the report shows the position and both values
            of a difference. Takes 28 bytes per token of each run before compression.
        tolerances: tolerances across layouts, schedules, experts and the reference; those on GPUs and across versions
            are wider by default.
        sft: settings of `recipes.sft` for all cases.
        sft_more: additional settings of `recipes.sft`, for the command line.
        kinds: named settings of `recipes.sft`, separated by spaces, for cases of `context`, `experts`, `hybrid`
            and `media` with `kind=NAME`.
        families: model families of the `reference` check; empty for all.
        models: small models of the families, as values of their config.json.
        formats, workers, schedules, layouts, context, experts, hybrid, media, isolation, reference: cases of the check,
            as `"ranks setting=value ..."`, starting with the reference. `format=NAME` and `version=NAME` select a
            dataset and an interpreter. `context`, `experts`, `hybrid` and `media` have one reference per kind; each
            case of `reference` is compared with a plain transformers model.
    """

    check: str = "formats"
    dataset: str | None = None
    datasets: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    folder: str = "runs/parity"
    fresh: bool = False
    steps: int = bounded(20, lowest=1)
    steps_before: int = bounded(2, lowest=1)
    slots: int | None = bounded(None, lowest=1, highest=100_000)
    timeout_s: float = bounded(900.0, above=0, highest=LONGEST_S)
    max_ranks: int = bounded(8, lowest=1)
    device: str = one_of("cpu", ("cpu", "cuda"))
    keep_batches: bool = True
    tolerances: Tolerances = field(default_factory=Tolerances)
    sft: list[str] = field(default_factory=list)
    sft_more: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    schedules: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    context: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    hybrid: list[str] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    isolation: list[str] = field(default_factory=list)
    families: list[str] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not set(self.checks) <= set(CHECKS):
            what = f"check {self.check!r} is unknown"
            raise ConfigError(what, where="check", fix=f"one or more of {', '.join(CHECKS)}, or all")
        for text in (*self.sft, *self.sft_more):
            # A dataset would come after a cell's own: every cell would train on this one, and agree.
            if fix := _OWN_SETTINGS.get(text.lstrip("+").partition("=")[0]):
                would = "replace the data of every cell" if fix == _DATA_FIX else "not be used"
                raise ConfigError(f"{text} would {would}", where="sft, sft_more", fix=fix)
        super().__post_init__()
        for name in ("datasets", "versions"):
            texts = getattr(self, name)
            for text in texts:
                if not all(text.partition("=")):
                    raise ConfigError(f"{text!r} is not NAME=PATH", where=name, fix=f"{name}='[\"NAME=PATH\"]'")
            if len(paths_by_name(texts)) < len(texts):
                raise ConfigError("a name is given twice", where=name, fix="omit one of them")
        if self.dataset is not None and is_uri(self.dataset):
            raise ConfigError("the dataset is a URI", where="dataset", fix="copy it to a local folder")
        if self.check == "versions" and not self.versions:
            what = "no interpreter of another version is specified, so there is nothing to compare"
            raise ConfigError(what, where="versions", fix="versions='[\"mcore_0.19=/path/to/venv/bin/python\"]'")

    @property
    def checks(self) -> list[str]:
        return list(dict.fromkeys(CHECKS if self.check == "all" else self.check.split("+")))

    def cases(self, check: str) -> list[str]:
        if check == "versions":
            return [f"1 {VERSION}={name}" for name in (THIS, *paths_by_name(self.versions))]
        return list(getattr(self, check))


def paths_by_name(texts: list[str]) -> dict[str, str]:
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def main(config: ParityConfig) -> int:
    # SIGTERM ends the runs too; a SIGKILL reaches them through the kernel, on Linux.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(config.folder).resolve()
    with os_errors_as(ConfigError, "the folder cannot be used", where=folder, fix="folder=DIR"):
        folder.mkdir(parents=True, exist_ok=True)
    device = device_of(config)
    source = Path(config.dataset).resolve() if config.dataset else make_dataset(folder / "data" / "made")
    cells, left_out = plan(config, source, folder, device)
    # In a log the table is as wide as it needs to be.
    console = open_console(width=200)
    slots, watch = config.slots or usable_cores(), log_cells(console)
    finished = run_cells(cells, folder, slots=slots, timeout_s=config.timeout_s, watch=watch, fresh=config.fresh)
    reported, known = [cell for cell in cells if cell.is_reported], {cell.name: cell for cell in cells}
    results = [cell_result(cell, finished, folder=folder, known=known, device=device) for cell in reported]
    report = ParityReport(
        title=f"Parity: {', '.join(config.checks)}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        environment={**environment(device), "settings": " ".join([*config.sft, *config.sft_more])},
        cells=[*results, *left_out],
    )
    publish(report, console, folder)
    return 0 if report.verdict == "same" else 1


def device_of(config: ParityConfig) -> str:
    """Return cpu or cuda; `auto` is refused, because tolerances depend on the device."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in (*config.sft, *config.sft_more))
    device = given.get("trainer.device", config.device)
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device is {device}", where="sft, sft_more", fix="trainer.device=cpu or cuda")
    return device


def plan(config: ParityConfig, source: Path, folder: Path, device: str) -> tuple[list[Cell], list[CellResult]]:
    """Return the cells to run, and results for the parts of the matrix that are left out."""
    cells: list[Cell] = []
    left_out: list[CellResult] = []
    kept = f"trainer.record_{'batches' if config.keep_batches else 'digests'}=true"
    fixed = ["resume=auto", f"trainer.device={device}", "trainer.checkpoint_interval=0", kept]
    settings = [*fixed, *config.sft, *config.sft_more]
    across = config.tolerances
    of_layouts = CheckPlan(across, from_checkpoint=True, shares_processes=True)
    plans = {
        **dict.fromkeys(("formats", "workers"), CheckPlan(IDENTICAL)),
        "schedules": CheckPlan(across),
        **dict.fromkeys(("layouts", *_BY_KIND), of_layouts),
        "isolation": CheckPlan(IDENTICAL, shares_processes=True, program=ISOLATION),
        "reference": CheckPlan(across, shares_processes=True),
        "versions": CheckPlan(OTHER_KERNELS if across == Tolerances() else across),
    }
    here = sys.executable
    for check in config.checks:
        if check == "versions" and not config.versions:
            reason = "no interpreter of another version is specified: versions='[\"NAME=PATH\"]'"
            left_out.append(CellResult("versions", check, {}, None, "skipped", "", reason=reason))
            continue
        is_plain = check == "reference"
        of: dict[str, Any] = {"steps_before": config.steps_before, "max_ranks": config.max_ranks}
        of["steps"] = ISOLATION_TURNS if check == "isolation" else config.steps
        of["pythons"] = {"": here, **({_PLAIN: here} if is_plain else {THIS: here, **paths_by_name(config.versions)})}
        for name, cases, more, datasets in parts_of(check, config, source, folder):
            own = plan_check(name, cases, plans[check], settings=[*settings, *more], datasets=datasets, **of)
            cells += [replace(own[0], plan=replace(plans[check], program=REFERENCE)), *own[1:]] if is_plain else own
    return cells, left_out


def parts_of(
    check: str, config: ParityConfig, source: Path, folder: Path
) -> Iterator[tuple[str, list[str], list[str], dict[str, str]]]:
    """Yield the name, cases, further settings and datasets by format of a check, or of each kind or family of it."""
    cases = config.cases(check)
    if check == "reference":
        from harness.parity.reference import make_model  # of torch

        for family in dict.fromkeys(config.families) or (*FAMILIES, *MEDIA_MODELS):
            require_choice(family, config.models, setting="families")
            model, data = make_model(family, config.models[family], folder / "models" / family), source
            if family in MEDIA_MODELS:
                encoder = read_hf_config(folder / "models" / family).settings["encoder"]
                data = make_dataset(folder / "data" / family, encoder=encoder)
            yield f"reference {family}", [f"1 version={_PLAIN}", *cases], model, {"": str(data)}
        return
    kinds = [parse_case(text, where=check).value_of(KIND) for text in cases]
    named = [kind or "" for kind in dict.fromkeys(kinds) if check in _BY_KIND and (kind or check != "context")]
    if unknown := [kind for kind in named if kind not in config.kinds]:
        fix = f"kind=NAME, one of {', '.join(config.kinds)}"
        raise ConfigError(f"a case selects the unknown kind {unknown[0]!r}", where="kinds", fix=fix)
    for kind in named:
        more, data = config.kinds[kind].split(), source
        if check == "media":  # the command line quotes the encoder
            given = [*config.sft, *config.sft_more, *more]
            encoder = next((text.partition("=")[2] for text in given if text.startswith("model.encoder=")), None)
            if encoder is None:
                what = f"the kind {kind!r} has no model.encoder"
                raise ConfigError(what, where="kinds", fix=f"kinds.{kind}='... model.encoder=NAME'")
            data = make_dataset(folder / "data" / kind, encoder=encoder.strip("'"))
        own = [text for text, its in zip(cases, kinds, strict=True) if its == kind]
        yield f"{check} {kind}", own, more, {"": str(data)}
    if check in _BY_KIND:
        cases = [text for text, kind in zip(cases, kinds, strict=True) if kind is None]
    if cases or not named:
        existing, datasets = paths_by_name(config.datasets), {"": str(source)}
        for name in filter(None, {parse_case(text, where=check).value_of(FORMAT) for text in cases}):
            if name not in existing and name not in FORMATS:
                what = f"format {name!r} does not exist"
                fix = f"one of {', '.join(FORMATS)}, or specify its dataset"
                raise ConfigError(what, where="format", fix=fix)
            datasets[name] = existing.get(name, str(folder / "data" / name))
            if name not in existing:  # converted once
                splits = {split: source / split for split in ("train", "validation") if (source / split).exists()}
                for split, stored in (splits or {"train": source}).items():
                    convert_dataset(stored, folder / "data" / name / split, format=name)
        yield check, cases, [], datasets


entry = hydra_entry("parity", ParityConfig, main)

if __name__ == "__main__":
    entry()
