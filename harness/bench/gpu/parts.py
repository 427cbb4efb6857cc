"""Parts of a first contact: each a process, or one a rank, whose result is a file, so that a stopped run continues."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.bench import load
from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Progress, count_targets, figure_table, read_figures
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.checks import require_cores
from harness.errors import ConfigError, HarnessError, os_errors_as
from harness.printing import escape_markdown
from harness.storage import write_atomically

DONE, FAILED, MISSING = "done", "failed", "missing"
REPORT_JSON, REPORT_PAGE = "report.json", "report.md"
# Imports from a slow disk.
_DESCRIBE_S = 300.0
_WITH_ENGINE = ("attention-flash", "attention-fused", "attention-unfused", "fusions")
# Of the file of a part: its report, or the reason why there is none; the machine is as `describe_gpus` has it.
_FIELDS = {"part", "status", "reason", "machine", "host", "size", "seconds", "report"}
# The attention and the scans of a model against plain ones, its fusions on and off, the losses of layouts against those
# of one rank, a model's loop against a bare one, packed chats against dense sequences, and checkpoints in the
# background. Each has the place of its function in this package, which gets sizes, a workspace and the word after the
# part's name, and the processes that it needs, None for one a GPU.
PARTS: dict[str, tuple[str, int | None]] = {
    "environment": ("environment:measure_environment", 1),
    "links": ("environment:measure_links", None),
    **{f"attention-{name}": ("agreement:measure_attention", 1) for name in ("torch", "flash", "fused", "unfused")},
    **{f"scan-{name}": ("agreement:measure_attention", 1) for name in ("mamba2", "delta")},
    "fusions": ("agreement:measure_fusions", 1),
    **{f"layouts-{ranks}": ("agreement:measure_layouts", ranks) for ranks in (1, 2, 4, 8)},
    **{f"step-{shape}": ("training:measure_step", None) for shape in ("1b", "8b")},
    **{f"packed-{shape}": ("training:measure_packed", 1) for shape in ("1b", "8b")},
    "checkpoint": ("training:measure_checkpoint", None),
}


def bench_gpu(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure the parts that have no file yet, and write the report of all.

    Raise ConfigError if the files in `out` are of another machine or size, or the folder cannot be written to.
    """
    out, chosen = Path(sizes.out), sizes.choose(PARTS)
    with os_errors_as(ConfigError, "the report cannot be written", where=out, fix="choose another folder with out=DIR"):
        out.mkdir(parents=True, exist_ok=True)
        progress("looking at the machine")
        # In a process of its own: this one stays without a GPU's memory.
        place = f"{__package__}.environment:describe_gpus"
        try:
            machine: dict[str, Any] = measure_apart(place, sizes.device, limit_s=_DESCRIBE_S)
        except HarnessError as error:
            what = f"this machine cannot be described: {error.what}"
            raise ConfigError(what, where=f"device={sizes.device}", fix="device=cpu, or auto") from error
        if not machine["gpus"]:
            require_cores(sizes.ranks, setting="ranks")
        results = {name: kept for name in PARTS if (kept := _read(out / f"{name}.json")) is not None}
        _check_same(results, machine, sizes)
        began = time.monotonic()
        left = []
        for name in chosen:
            if results.get(name, {}).get("status") == DONE:
                progress(f"{name}: measured before")
                continue
            if sizes.total_limit_s and time.monotonic() - began > sizes.total_limit_s:
                left.append(name)
                continue
            progress(name)
            results[name] = _measure(name, machine, sizes, out)
            write_atomically(out / f"{name}.json", json.dumps(results[name], indent=2).encode())
            if results[name]["status"] != DONE:
                progress(f"{name} {results[name]['status']}: {results[name]['reason']}")
        results = {name: results[name] for name in PARTS if name in results}
        report = _join(machine, results, left)
        files = {
            REPORT_JSON: json.dumps({"machine": machine, "parts": results, "report": report.to_dict()}, indent=2),
            REPORT_PAGE: render_page(report),
        }
        for name, text in files.items():
            write_atomically(out / name, text.encode(errors="replace"))
    report.notes.append(f"report {out / REPORT_PAGE}")
    return report


def _read(path: Path) -> dict[str, Any] | None:
    """Return a part that was measured; None for none, and for a file that is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        result: dict[str, Any] = json.loads(path.read_bytes())
        if result["status"] == DONE:
            read_figures(result["report"])
        return result if result.keys() == _FIELDS else None
    return None


def _check_same(results: Mapping[str, dict[str, Any]], machine: dict[str, Any], sizes: Sizes) -> None:
    for name, result in results.items():
        made = (result["size"], result["machine"])
        if result["status"] == DONE and made != (sizes.size, machine):  # others are measured again
            of = "; this call: ".join(
                ", ".join(f"{key} {value}" for key, value in {"size": size, **facts}.items())
                for size, facts in (made, (sizes.size, machine))
            )
            fix = "choose another folder with out=DIR, or remove the files in this one"
            raise ConfigError(f"the part {name} is of a different machine or size: {of}", where=sizes.out, fix=fix)


def _measure(name: str, machine: Mapping[str, Any], sizes: Sizes, out: Path) -> dict[str, Any]:
    gpus = len(machine["gpus"])
    there = sizes.ranks or gpus or 2
    ranks = PARTS[name][1] or there
    of: dict[str, Any] = {"part": name, "status": MISSING, "reason": "", "machine": dict(machine)}
    of |= {"host": socket.gethostname(), "size": sizes.size, "seconds": 0.0, "report": {}}
    if name in _WITH_ENGINE and machine["engine_missing"]:
        return of | {"reason": f"Transformer Engine cannot be used: {machine['engine_missing']}"}
    needed = max(ranks, 2) if name == "links" else ranks
    if needed > there or (gpus and needed > gpus):
        return of | {"reason": f"requires {needed} {'GPUs' if gpus else 'processes'}, but has {gpus or there}"}
    folder = out / f"{name}.work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    start = time.monotonic()
    try:
        arguments, log = (name, sizes.size, sizes.device, folder), out / f"{name}.log"
        report = measure_apart(f"{__name__}:run_part", *arguments, ranks=ranks, limit_s=sizes.part_limit_s, log=log)
        done = {"status": DONE, "report": report}
    except HarnessError as error:
        done = {"status": FAILED, "reason": error.what}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return of | done | {"seconds": round(time.monotonic() - start, 1)}


def run_part(name: str, size: str, device: str, folder: str) -> dict[str, Any]:
    from harness.bench.gpu.environment import SIZES

    sizes, workspace = replace(SIZES[size], device=device), Workspace(Path(folder), keep=True)
    (place, _), word = PARTS[name], name.partition("-")[2]
    report: BenchReport = load(f"{__package__}.{place}")(sizes, workspace, word)
    return report.to_dict()


def _join(machine: Mapping[str, Any], results: Mapping[str, dict[str, Any]], left: Sequence[str]) -> BenchReport:
    """Return one report of all parts; parts without figures are notes."""
    report = BenchReport("gpu")
    gpus = machine["gpus"]
    report.notes.append(f"{len(gpus)} x {gpus[0]}, driver {machine['driver']}" if gpus else "no GPU: a CPU with gloo")
    hosts = sorted({result["host"] for result in results.values() if result["status"] == DONE})
    if len(hosts) > 1:
        report.notes.append(f"measured on {len(hosts)} machines of one kind: {', '.join(hosts)}")
    for name, result in results.items():
        if result["status"] != DONE:
            report.notes.append(f"{name} {result['status']}: {result['reason']}")
            if result["status"] == FAILED:
                report.failed.append(name)
            continue
        made = read_figures(result["report"])
        report.notes += [f"{name}: {note}" for note in made.notes]
        for figure in made.figures:
            report.add(replace(figure, name=f"{name}: {figure.name}", of=tuple(f"{name}: {one}" for one in figure.of)))
    report.notes += [f"{name} was not started within total_limit_s: run again to continue" for name in left]
    return report


def render_page(report: BenchReport) -> str:
    """Return the figures and notes of all parts as Markdown."""
    notes = [f"- {escape_markdown(note)}" for note in report.notes]
    head = ["# First contact with GPUs", "", f"{count_targets([report])}.", ""]
    return "\n".join([*head, figure_table(report.figures).to_markdown(), "", *notes, ""])
