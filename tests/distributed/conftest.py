"""Real runs of `recipes.sft` in processes of their own, on a small dataset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import prepared  # noqa: F401
import psutil
import pytest
from small_packs import write_small_packs

from harness.config import compose_config
from harness.parity.running import free_ports
from harness.train.metrics import whole_lines
from tests.samples.warm_python import warm_python

SMALL = (
    *("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", "loader.global_batch_size=6"),
    *("loader.block_packs=4", "schedule.max_tokens_per_rank=256", "optimizer.decay_steps=10", "loader.num_workers=1"),
    "trainer.device=cpu",
)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 packs of up to 256 tokens with a learnable pattern, and 5 for validation."""
    return write_small_packs(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    metrics: list[dict[str, Any]]

    def column(self, name: str) -> list[Any]:
        return [line[name] for line in self.metrics]


ROOT = Path(__file__).resolve().parents[2]


def launcher(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), "-m"]


FORKED = [sys.executable, "-m", "tests.distributed.forked"]


def forked(ranks: int) -> list[str]:
    """The start of a command that runs a module on ranks that share their imports, for what ranks compute."""
    return [*FORKED, str(ranks)]


def overrides_of(dataset: Path, folder: Path, *overrides: str) -> list[str]:
    return [f"data.path={dataset}", f"run_dir={folder}", *SMALL, *overrides]


def command(dataset: Path, folder: Path, *overrides: str, ranks: int = 1) -> list[str]:
    return [*launcher(ranks), "harness.recipes.sft", *overrides_of(dataset, folder, *overrides)]


def environment() -> dict[str, str]:
    # A clean environment: the test process may have a launcher's variables.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1"}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    # The last line of an active run may be half written.
    return [json.loads(line) for line in whole_lines(path)] if path.exists() else []


@cache
def server_of(variables: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """Return the process of `forked` that answers requests with these variables; it ends with this one."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # A path may have other packages than those that are imported.
    python = sys.executable if "PYTHONPATH" in dict(variables) else warm_python()
    return subprocess.Popen([python, *FORKED[1:]], env=dict(variables), cwd=ROOT, text=True, **pipes)


def run_forked(ranks: int, arguments: list[str], timeout_s: float) -> tuple[int, str]:
    server = server_of(tuple(sorted(environment().items())))
    with tempfile.NamedTemporaryFile() as output:
        request = {"ranks": ranks, "arguments": arguments, "output": output.name, "timeout_s": round(timeout_s)}
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        except BaseException:  # its answer, if any, is not that of the next request
            server.kill()
            server_of.cache_clear()
            raise
        return code, Path(output.name).read_text(errors="replace")


def run_command(arguments: list[str], *, timeout_s: float = 850) -> tuple[int, str]:
    if arguments[:3] == FORKED:
        return run_forked(int(arguments[3]), arguments[4:], timeout_s)
    done = subprocess.run(
        arguments, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout + done.stderr


def train(
    folder: Path, settings: Sequence[str], *, ranks: int = 1, recipe: str = "sft", start: Callable[..., Any] = launcher
) -> list[dict[str, Any]]:
    """Run a recipe to its end on ranks that `start` begins; return the metrics in the folder of the run."""
    code, output = run_command([*start(ranks), f"harness.recipes.{recipe}", *settings])
    assert code == 0, output
    return read_metrics(folder)


def run_ranks(ranks: int, module: str, *arguments: object, timeout_s: float = 850) -> str:
    """Run a module, of this folder by its name, on ranks that share their imports; return what they print."""
    command = [*forked(ranks), module if "." in module else f"tests.distributed.{module}", *map(str, arguments)]
    code, output = run_command(command, timeout_s=timeout_s)
    assert code == 0, output
    return output


def run_jobs(ranks: int, module: str, folder: Path, jobs: Sequence[Sequence[Any]], *arguments: object) -> None:
    """Run a module that takes a list of jobs, each of which meets at a port of its own (`forked.jobs_of`)."""
    listed = folder / "jobs.json"
    listed.write_text(json.dumps([[port, *job] for port, job in zip(free_ports(len(jobs)), jobs, strict=True)]))
    run_ranks(ranks, module, listed, *arguments, timeout_s=1000)


def run_sft(ranks: int, place: Path, runs: Sequence[tuple[list[str], str, str | None]]) -> str:
    """Train runs in the same processes: the settings of each, its folder, and the one that it is first copied from."""
    jobs = [[port, *run] for port, run in zip(free_ports(len(runs)), runs, strict=True)]
    listed = place / "runs.json"
    listed.write_text(json.dumps({"program": "harness.recipes.sft", "runs": jobs}))
    return run_ranks(ranks, "harness.recipes.sft_runs", listed)


def found_by(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Return what each rank left in a file of its own."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def run_here(recipe: Any, schema: type[Any], overrides: list[str]) -> None:
    """Run one rank in this process, which saves the seconds of its imports."""
    assert recipe.main(compose_config(recipe.__name__.rpartition(".")[2], schema, overrides)) == 0


@pytest.fixture
def sft(dataset: Path) -> Callable[..., Run]:
    """sft(folder, *overrides, ranks=1): run to the end."""

    def run(folder: Path, *overrides: str, ranks: int = 1) -> Run:
        arguments = overrides_of(dataset, folder, *overrides)
        code, output = run_command([*forked(ranks), "harness.recipes.sft", *arguments])
        return Run(code, output, read_metrics(folder))

    return run


def kill_after(step: int, arguments: list[str], folder: Path) -> None:
    """Start a run, and SIGKILL every process of it once `step` is in its metrics."""
    process = subprocess.Popen(
        arguments, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 600
    try:
        while len(read_metrics(folder)) < step:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """SIGKILL a process and all below it, and wait for their ends; ranks of torchrun are in sessions of their own."""
    everyone = []
    if process.poll() is None:
        top = psutil.Process(process.pid)
        top.suspend()  # it starts no more
        everyone = top.children(recursive=True)
    process.kill()
    for child in everyone:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    assert psutil.wait_procs(everyone, timeout=120)[1] == []
