"""The parts of a report, each measured in processes of its own and kept as a file, so that a stopped run continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness.bench.figures import BenchReport, Figure, Progress, read_figures
from harness.bench.gpu.page import render_page
from harness.bench.workspace import Workspace
from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError, HarnessError, os_errors_as
from harness.parity import end_with_parent
from harness.settings import find_odd, to_plain
from harness.storage import write_atomically

DONE, FAILED, MISSING = "done", "failed", "missing"
REPORT_JSON, REPORT_PAGE = "report.json", "report.md"
_MACHINE = "machine"
# Of a launcher, which would make a part's process a rank of the job that this process is in.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
# A rank that is killed leaves its launcher some time to end the others.
_GRACE_S = 15.0
# Imports from a slow disk.
_DESCRIBE_S = 300.0


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        function: `module:name` in this package; called with the place, and `argument` where there is one.
        about: for the page.
        argument: of the function.
        ranks: processes that it needs; None for one a GPU (at least `least_ranks`).
        needs_engine: it cannot be measured without Transformer Engine.
    """

    function: str
    about: str
    argument: str | int | None = None
    ranks: int | None = 1
    least_ranks: int = 1
    needs_engine: bool = False


def _attention(backend: str) -> Part:
    return Part(
        "attention:measure_attention",
        f"Losses and gradients of a model with model.attention={backend} against plain attention, its layers in "
        "float32; documents of a row must not see each other, and defects that other trainers had must be found.",
        backend,
        needs_engine=backend != "torch",
    )


def _layouts(ranks: int) -> Part:
    about = "Losses of each layout from one checkpoint, against one rank that trains everything; isolation on each."
    return Part("layouts:measure_layouts", about, ranks, ranks=ranks)


def _step(shape: str) -> Part:
    return Part(
        "training:measure_step",
        f"A model of the {shape.upper()} shape on packed chats: our loop and a bare Megatron loop take turns on the "
        "same batches; then our loop alone, and two steps of it under the profiler.",
        shape,
        ranks=None,
    )


PARTS = {
    "environment": Part("environment:measure_environment", "What is installed, and the rates that one GPU reaches."),
    "links": Part("environment:measure_links", "An all-reduce over all GPUs.", ranks=None, least_ranks=2),
    **{f"attention-{backend}": _attention(backend) for backend in ("torch", "flash", "fused", "unfused")},
    **{f"layouts-{ranks}": _layouts(ranks) for ranks in (1, 2, 4, 8)},
    "step-1b": _step("1b"),
    "step-8b": _step("8b"),
    "packed-8b": Part(
        "training:measure_packed",
        "Layers of the 8B shape, forward and backward: a packed row of chats, dense sequences of as many tokens and as "
        "much attention, and one dense sequence take turns.",
    ),
    "checkpoint": Part(
        "saving:measure_checkpoint",
        "How long training waits for a checkpoint in the background, against one copy of what a rank owns.",
        ranks=None,
    ),
}


@dataclass(frozen=True)
class GpuSettings:
    """Parts to measure, their sizes, and the folder of their files.

    Attributes:
        out: folder of the parts' files and of the report; parts that it has are not measured again.
        device: auto, cpu or cuda.
        size: full, or tiny for models that a CPU trains in seconds.
        parts: measurements to make: environment, links, attention-*, layouts-*, step-*, packed-8b, checkpoint; all for
            every one.
        ranks: processes of parts on all GPUs; null for one a GPU, and 2 on a CPU.
        part_limit_s: a part that takes longer is ended, and reported as failed.
        total_limit_s: begin no part after so many seconds; the next call continues. 0 for no limit.
    """

    out: str = "gpu-report"
    device: str = "auto"
    size: str = "full"
    parts: tuple[str, ...] = ("all",)
    ranks: int | None = bounded(None, lowest=1, highest=1024)
    part_limit_s: float = bounded(480.0, above=0, highest=86_400)
    total_limit_s: float = bounded(0.0, lowest=0, highest=86_400)

    def __post_init__(self) -> None:
        check_numbers(self, "")
        require_choice(self.device, ("auto", "cpu", "cuda"), setting="device")
        require_choice(self.size, ("full", "tiny"), setting="size")
        for part in self.parts:
            require_choice(part, ("all", *PARTS), setting="parts")


QUICK = GpuSettings(size="tiny")


def bench_gpu(settings: GpuSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure the parts that have no file yet, and write the report of all.

    Raises:
        ConfigError: the files in `out` are of another machine or size, or the folder cannot be written to.
    """
    out = Path(settings.out)
    with os_errors_as(ConfigError, "the report cannot be written", where=out, fix="name another folder with out=DIR"):
        out.mkdir(parents=True, exist_ok=True)
        progress("looking at the machine")
        machine = _describe(settings, workspace.folder)
        results = {name: kept for name in PARTS if (kept := _read(out / f"{name}.json")) is not None}
        _check_same(results, machine, settings, out)
        began = time.monotonic()
        left = []
        for name in PARTS if "all" in settings.parts else dict.fromkeys(settings.parts):
            if results.get(name, {}).get("status") == DONE:
                progress(f"{name}: measured before")
                continue
            if settings.total_limit_s and time.monotonic() - began > settings.total_limit_s:
                left.append(name)
                continue
            progress(name)
            results[name] = _measure(name, machine, settings, out)
            write_atomically(out / f"{name}.json", json.dumps(results[name], indent=2).encode())
            if results[name]["status"] != DONE:
                progress(f"{name} {results[name]['status']}: {results[name]['reason']}")
        report = _join(settings, machine, {name: results[name] for name in PARTS if name in results}, left)
        files = {
            REPORT_JSON: json.dumps({"machine": machine, "parts": results, "report": report.to_dict()}, indent=2),
            REPORT_PAGE: render_page(machine, results, {name: part.about for name, part in PARTS.items()}, left),
        }
        for name, text in files.items():
            write_atomically(out / name, text.encode(errors="replace"))
    report.notes.append(f"report {out / REPORT_PAGE}")
    return report


def _describe(settings: GpuSettings, folder: Path) -> dict[str, Any]:
    """Return the machine as a process of its own sees it: this one stays without a GPU's memory."""
    path = folder / "machine.json"
    code, output = _run([_MACHINE, settings.device, str(path)], 1, _DESCRIBE_S, log=folder / "machine.log")
    if code:
        raise ConfigError(
            f"this machine cannot be described: {output}", where=f"device={settings.device}", fix="device=cpu, or auto"
        )
    machine: dict[str, Any] = json.loads(path.read_text())
    return machine


def _read(path: Path) -> dict[str, Any] | None:
    """Return a part that was measured; None for none, and for a file that is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        result: dict[str, Any] = json.loads(path.read_text())
        texts = (result["host"], result["size"], result["reason"])
        if result["status"] in (DONE, FAILED, MISSING) and isinstance(result["machine"], dict):
            if result["status"] == DONE:
                report = read_figures(result["report"])
                texts = (*texts, *report.notes)
                if any(find_odd(to_plain(figure), Figure) for figure in report.figures):
                    return None
            numbers = [result["seconds"]] if result["status"] == DONE else []
            if all(isinstance(text, str) for text in texts) and all(isinstance(one, int | float) for one in numbers):
                return result
    return None


def _check_same(
    results: Mapping[str, dict[str, Any]], machine: dict[str, Any], settings: GpuSettings, out: Path
) -> None:
    for name, result in results.items():
        if result["status"] != DONE:
            continue  # measured again
        fix = "another folder with out=DIR, or remove the files of this one"
        if result["size"] != settings.size:
            what = f"the part {name} has size={result['size']}, and this call size={settings.size}"
            raise ConfigError(what, where=str(out), fix=fix)
        differ = [key for key in machine if result["machine"].get(key) != machine[key]]
        if differ:
            was, now = (", ".join(f"{key} {of.get(key)}" for key in differ) for of in (result["machine"], machine))
            raise ConfigError(f"the part {name} is of another machine: {was}; this one: {now}", where=str(out), fix=fix)


def _measure(name: str, machine: Mapping[str, Any], settings: GpuSettings, out: Path) -> dict[str, Any]:
    """Return a part's result: its report, or the reason why there is none."""
    part = PARTS[name]
    gpus = len(machine["gpus"])
    there = settings.ranks or gpus or 2
    ranks = there if part.ranks is None else part.ranks
    result = {
        "part": name,
        "status": MISSING,
        "reason": "",
        "machine": dict(machine),
        "host": socket.gethostname(),
        "size": settings.size,
    }
    if part.needs_engine and machine["engine_missing"]:
        return result | {"reason": f"Transformer Engine cannot be used: {machine['engine_missing']}"}
    needed = max(ranks, part.least_ranks)
    if needed > there or (gpus and needed > gpus):
        return result | {"reason": f"needs {needed} {'GPUs' if gpus else 'processes'}, and there are {gpus or there}"}
    folder, made = out / f"{name}.work", out / f"{name}.measured"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        arguments = [name, settings.device, str(made), settings.size, str(folder)]
        code, output = _run(arguments, ranks, settings.part_limit_s, log=out / f"{name}.log")
        seconds = round(time.monotonic() - start, 1)
        if code or not made.exists():
            return result | {"status": FAILED, "reason": output, "seconds": seconds}
        return result | {"status": DONE, "seconds": seconds, "report": json.loads(made.read_text())}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        made.unlink(missing_ok=True)


def _run(arguments: Sequence[str], ranks: int, limit_s: float, *, log: Path) -> tuple[int, str]:
    """Run this package's program on that many ranks; return its exit code, and the end of what it printed."""
    root = str(Path(harness.__file__).parent.parent)
    environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    if ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "harness.bench.gpu", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A part that goes on would share its GPUs with those of the next call.
            preexec_fn=end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 1, f"it did not end within {limit_s:g} s"
        finally:
            _end(process)
    return code, _find_reason(log.read_text(errors="replace")) or f"exit code {code}, and no output"


def _find_reason(output: str) -> str:
    """Return the last line of an output that names an error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The launcher's own error comes last, and has no reason.
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line] or lines
    return errors[-1][-500:] if errors else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all of its ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            if sign == signal.SIGKILL:
                return


def _join(
    settings: GpuSettings, machine: Mapping[str, Any], results: Mapping[str, dict[str, Any]], left: Sequence[str]
) -> BenchReport:
    """Return one report of all parts; parts without figures are notes."""
    report = BenchReport("gpu", asdict(settings))
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
        for figure in read_figures(result["report"]).figures:
            values = asdict(figure) | {"name": f"{name}: {figure.name}"}
            values["of"] = tuple(f"{name}: {of}" for of in figure.of)
            report.add(Figure(**values))
    report.notes += [f"{name} was not begun within total_limit_s: call again to continue" for name in left]
    return report


def fail(error: HarnessError) -> str:
    """Return an error as one line for the log of a part."""
    return f"{type(error).__name__}: {error.what} (where: {error.where}; fix: {error.fix})"
