"""Prove that other settings train the same: real runs from one checkpoint, held against a run of one rank.

    python -m recipes.parity check=layouts

Prints a table of the largest relative differences and exits with code 1 where a case is beyond tolerance.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from harness.config import hydra_entry
from harness.errors import ConfigError, HarnessError
from harness.formats import Provenance, open_writer
from harness.records import Pack
from harness.report.metrics import METRICS_FILE, StepMetrics, read_metrics
from harness.report.parity.compare import Agreement, Case, Tolerances, compare, parse_case, render

CHECKS = ("layouts",)


@dataclass
class ParityConfig:
    """What to compare.

    Attributes:
        check: layouts.
        data: a dataset with `train` and `validation`, None for a small one that is made for the check.
        folder: where runs are kept; removed first.
        steps: after the checkpoint that every case starts from.
        steps_before: that the reference makes before it, so that the optimizer's state is compared too.
        timeout_s: of the runs of one number of ranks together.
        max_ranks: cases of more ranks are left out.
        tolerances: on losses and gradient norms.
        sft, sft_more: settings of `recipes.sft` for every case; the second is for the command line.
        layouts: the cases, as `"ranks setting=value ..."`.
    """

    check: str = "layouts"
    data: str | None = None
    folder: str = "runs/parity"
    steps: int = 20
    steps_before: int = 2
    timeout_s: float = 900.0
    max_ranks: int = 8
    tolerances: Tolerances = field(default_factory=Tolerances)
    sft: list[str] = field(default_factory=list)
    sft_more: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ConfigError(f"check {self.check!r} is unknown", where="check", fix=f"one of {', '.join(CHECKS)}")
        if self.steps < 1 or self.steps_before < 1:
            raise ConfigError(f"steps are {self.steps} and {self.steps_before}", where="steps", fix="1 or more each")


@hydra_entry("parity", ParityConfig)
def main(config: ParityConfig) -> int:
    cases = [case for case in map(parse_case, config.layouts) if case.ranks <= config.max_ranks]
    if not cases:
        raise ConfigError("there is no case to run", where="layouts, max_ranks", fix="name cases, or allow more ranks")
    folder = Path(config.folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = Path(config.data).resolve() if config.data else make_dataset(folder / "data")
    runs = Runs(folder, data, config)

    agreements: dict[str, Agreement] = {}
    expected: list[StepMetrics] = []
    cases.sort(key=lambda case: case.ranks)
    for ranks in sorted({1, *(case.ranks for case in cases)}):
        group = [case for case in cases if case.ranks == ranks]
        print(f"{len(group)} cases of {ranks} rank{'s' * (ranks > 1)}", flush=True)
        runs.run([*([runs.start, runs.reference] if ranks == 1 else []), *map(runs.job, group)], ranks)
        if ranks == 1:
            expected = runs.expected()
        for case in group:
            agreements[case.name] = compare(expected, runs.job(case).metrics(), config.tolerances)
    print(render(agreements))
    (folder / "parity.json").write_text(json.dumps({name: asdict(one) for name, one in agreements.items()}, indent=2))
    return 0 if all(one.agrees for one in agreements.values()) else 1


@dataclass(frozen=True)
class Job:
    """One run of `recipes.sft`: up to `steps`, from a copy of the folder `start` on."""

    name: str
    folder: Path
    steps: int
    overrides: tuple[str, ...]
    start: Path | None

    def metrics(self) -> list[StepMetrics]:
        path = self.folder / METRICS_FILE
        return read_metrics(path) if path.exists() else []


class Runs:
    """Starts jobs, those of one number of ranks in the same processes."""

    def __init__(self, folder: Path, data: Path, config: ParityConfig) -> None:
        self._folder = folder
        self._timeout_s = config.timeout_s
        self._steps = config.steps_before + config.steps
        self._settings = [
            f"data.path={data}",
            "resume=auto",
            "trainer.device=cpu",
            "trainer.checkpoint_interval=0",
            f"optimizer.decay_steps={self._steps}",
            *config.sft,
            *config.sft_more,
        ]
        self.start = Job("start", folder / "start", config.steps_before, ("parallel=data",), None)
        self.reference = self._from_start("reference", ("parallel=data",))

    def job(self, case: Case) -> Job:
        return self._from_start(case.name, case.overrides)

    def _from_start(self, name: str, overrides: tuple[str, ...]) -> Job:
        folder = self._folder / name.replace(" ", "_").replace("=", "-")
        return Job(name, folder, self._steps, overrides, self.start.folder)

    def expected(self) -> list[StepMetrics]:
        """What the reference run did; raises HarnessError where it did not reach its end."""
        steps = self.reference.metrics()
        if len(steps) != self._steps:
            raise HarnessError(
                f"the reference made {len(steps)} steps of {self._steps}",
                where=str(self._log(1)),
                fix="mend what its log names",
            )
        return steps

    def run(self, jobs: list[Job], ranks: int) -> None:
        """Run all; one that fails ends its processes, and those after it start in new ones."""
        while jobs:
            self._launch(jobs, ranks)
            done = 0
            while done < len(jobs) and len(jobs[done].metrics()) == jobs[done].steps:
                done += 1
            if done < len(jobs):
                print(f"{jobs[done].name} failed; see {self._log(ranks)}", flush=True)
            jobs = jobs[done + 1 :]

    def _launch(self, jobs: list[Job], ranks: int) -> None:
        listed = self._folder / f"ranks-{ranks}.json"
        described = [
            [port, [*self._settings, f"trainer.steps={job.steps}", *job.overrides], str(job.folder), _text(job.start)]
            for port, job in zip(_free_ports(len(jobs)), jobs, strict=True)
        ]
        listed.write_text(json.dumps(described))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        with self._log(ranks).open("a") as log:
            try:
                subprocess.run(
                    [sys.executable, *launcher, "-m", "recipes.sft_runs", str(listed)],
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                    stdout=log,
                    stderr=log,
                    timeout=self._timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                log.write(f"ended after {self._timeout_s:g} s\n")

    def _log(self, ranks: int) -> Path:
        return self._folder / f"ranks-{ranks}.log"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def make_dataset(folder: Path, *, pack_size: int = 256) -> Path:
    """A dataset of short sequences with a pattern that can be learnt: 160 packs, and 9 for validation."""
    rng = np.random.default_rng(0)
    provenance = Provenance(tokenizer="none", tokenizer_hash="0" * 16, counts={"vocab_size": 300})
    for split, count in (("train", 160), ("validation", 9)):
        with open_writer(folder / split, format="parquet", pack_size=pack_size, provenance=provenance) as writer:
            for _ in range(count):
                lengths = rng.integers(5, pack_size // 3, size=rng.integers(1, 4))
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
                ids = np.concatenate(
                    [rng.integers(0, 290) + np.arange(length, dtype=np.int32) % 7 for length in lengths]
                )
                mask = np.minimum(rng.integers(0, 4, size=ids.shape[0], dtype=np.uint8), 1)
                mask[np.append(starts[1:], ids.shape[0]) - 1] = 0
                writer.append(Pack(ids, mask, starts))
    return folder


if __name__ == "__main__":
    main()
