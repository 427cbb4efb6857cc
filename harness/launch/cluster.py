"""Settings of a Slurm cluster, as in `configs/cluster/`: one file per cluster, and a job adds only its own settings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from harness.checks import LONGEST_S, NOT_SET, SET, CheckedSettings, Rule, bounded, one_of
from harness.errors import ConfigError, os_errors_as
from harness.printing import count_of, one_line, printable

# Options of sbatch with settings of the same name.
SBATCH_NAMES = ("account", "partition", "qos", "constraint", "reservation", "exclude")
LAUNCHERS = ("srun", "torchrun")
# `--dependency` of sbatch, by `cluster.successor`.
SUCCESSORS = {"none": "", "afterany": "afterany:$SLURM_JOB_ID", "singleton": "singleton"}
# Characters without a special meaning in `#SBATCH` lines, which are shell comments that Slurm parses by its own rules.
_DIRECTIVE = re.compile(r"[A-Za-z0-9._/+@:,=\[\]&|*()-]*")
# Characters without a special meaning in the shell either.
_WORD = re.compile(r"[A-Za-z0-9._/+@:,=-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass
class PreflightConfig(CheckedSettings, section="cluster.preflight"):
    """Requirements that every node has to meet before the first step.

    Attributes:
        enabled: check the nodes before the ranks start.
        timeout_s: time limit in seconds for the checks of a node. A node that has not responded after another 20 s is
            reported. With Pyxis, the time to unpack the image is included.
        min_shm_mib: minimum size of /dev/shm in MiB, which loader workers use to pass batches.
        min_disk_gib: minimum free space in GiB on the file system of the run's folder.
        max_clock_offset_s: maximum difference in seconds between the clocks of a node and the first node.
        min_inodes: minimum number of free inodes on the file system of the run's folder.
        min_read_mib_s: minimum rate in MiB/s at which a node reads the largest file of the dataset and of the weights.
        min_node_gb_s: minimum bus bandwidth in GB/s of an all-reduce within a node, if it has several ranks.
        min_pair_gb_s: minimum bus bandwidth in GB/s of an all-reduce between two nodes, in jobs of at least three
            nodes.
        min_all_gb_s: minimum bus bandwidth in GB/s of an all-reduce over all nodes.
        min_gemm_tflops: minimum TFLOP/s of a matrix product on every GPU in bfloat16, or on the CPU in float32; 0 for
            none.
        exclude_failed: exclude failed nodes and requeue the job if the partition has enough other nodes.
        same_code: require the container image to contain the same code and configs as the submitting folder.
    """

    enabled: bool = True
    timeout_s: float = bounded(40.0, lowest=5, highest=3600)
    min_shm_mib: int = bounded(1024)
    min_disk_gib: float = bounded(10.0, lowest=0)
    max_clock_offset_s: float = bounded(2.0, lowest=0, highest=LONGEST_S)
    min_inodes: int = bounded(1000)
    min_read_mib_s: float = bounded(5.0, lowest=0)
    min_node_gb_s: float = bounded(0.002, lowest=0)
    min_pair_gb_s: float = bounded(0.002, lowest=0)
    min_all_gb_s: float = bounded(0.002, lowest=0)
    min_gemm_tflops: float = bounded(0.0, lowest=0)
    exclude_failed: bool = True
    same_code: bool = True


@dataclass
class ClusterConfig(CheckedSettings, section="cluster"):
    """Settings of one cluster: its Slurm options, its launcher, its environment.

    Attributes:
        account: account to charge, for `sbatch --account`; empty for Slurm's default.
        partition: partition of the job; empty for Slurm's default.
        qos: quality of service of the job; empty for Slurm's default.
        constraint: required node features; empty for none.
        reservation: reservation to run in; empty for none.
        exclude: nodes to exclude, in Slurm's notation; empty for none.
        time: time limit of one attempt, in the notation of sbatch. An unfinished run saves a checkpoint and requeues.
        gpus_per_node: number of GPUs per node; 0 for nodes without GPUs.
        gpu_gib: memory of a GPU in GiB. A run whose plan exceeds it is refused; null skips the check.
        ranks_per_node: number of ranks per node; with GPUs, one per GPU.
        cpus_per_rank: number of CPU cores per rank, loader workers included: the cores of a node divided by its ranks.
        memory: memory per node, in the notation of sbatch; "0" for all of it, empty for Slurm's default.
        exclusive: do not share the nodes with other jobs.
        sbatch: additional options of sbatch, each as `--name=value`.
        launcher: `srun` starts every rank; `torchrun` starts one agent per node, which starts the ranks.
        python: Python interpreter of the job, at the same path on every node. Empty uses the interpreter of `harness
            submit`, or `python3` in a container.
        image: container image for Pyxis (`/shared/x.sqsh` or `registry#name:tag`); empty runs without a container.
        mounts: container mounts as `SOURCE:TARGET[:flags]`. They must include the run's folder and the datasets.
        container_name: unpack the image once per node and job into a named container, instead of once per step.
            Requires that Pyxis removes named containers at the end of the job (`container_scope=job`).
        local_dir: folder on the nodes' local disks, such as `/scratch/me`. Each node copies image, datasets and weights
            there before the first step and verifies their hashes, and the ranks read the copies. Copies are reused by
            later jobs and are not removed automatically. Pairs of a corpus and data in buckets are not copied. Empty
            for none.
        container_writable: allow the job to write to the container's file system; changes are lost with the container.
        mpi: value of `--mpi` of srun, such as `none` or `pmix`; empty uses the default of the site.
        workdir: working directory. Empty uses that of `harness submit`, or the project's folder in a container.
        setup: shell commands to run first, such as `module load`.
        env: environment variables of all ranks.
        cpu_bind: value of `--cpu-bind` of srun, such as `cores`; empty uses the default of the cluster. With torchrun,
            any value but `none` binds each rank to its share of the cores of its GPU's NUMA node.
        master_addr: address of the first node that other nodes connect to; `%N` is replaced by its name.
        signal_lead_s: seconds before the time limit at which the ranks are signaled to save a checkpoint. Must exceed
            the time of one step and one checkpoint.
        max_same_failures: number of identical failures at the same step after which the job is not requeued.
        restarts: number of times that the ranks are restarted within the same job after a failure, before Slurm
            requeues the job. A restart takes seconds; a requeued job waits in the queue and repeats the preflight.
        spares: number of additional nodes to request. Within the job, a spare replaces a node that fails the preflight,
            whose rank fails or hangs, or that is excluded as slow. At least this many restarts are allowed.
        successor: keep a second job in the queue that continues the run if the first one ends without being requeued,
            for example because Slurm kills its script. `afterany` makes it depend on the first job; `singleton` on the
            job name, which is then the name of the run's folder; `none` submits no second job.
        preflight: checks that every node must pass before the first step.
    """

    account: str = ""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    time: str = "04:00:00"
    gpus_per_node: int = bounded(0, highest=1024)
    gpu_gib: float | None = bounded(None, above=0, highest=1_000_000)
    ranks_per_node: int = bounded(1, lowest=1, highest=1024)
    cpus_per_rank: int = bounded(1, lowest=1, highest=65_536)
    memory: str = ""
    exclusive: bool = False
    sbatch: list[str] = field(default_factory=list)
    launcher: str = one_of("srun", LAUNCHERS)
    python: str = ""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    container_name: bool = False
    local_dir: str = ""
    container_writable: bool = False
    mpi: str = ""
    workdir: str = ""
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cpu_bind: str = ""
    master_addr: str = "%N"
    signal_lead_s: int = bounded(120, lowest=1, highest=LONGEST_S)
    max_same_failures: int = bounded(3, lowest=1)
    restarts: int = bounded(0, highest=1000)
    spares: int = bounded(0, highest=1000)
    successor: str = one_of("none", SUCCESSORS)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)

    rules = tuple(
        Rule({f"cluster.{name}": SET, "cluster.image": NOT_SET}, "it requires a container image", "set cluster.image")
        for name in ("mounts", "container_name", "container_writable")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        quoted = dict.fromkeys(("python", "image", "mounts", "env"), check_quoted)
        directives = dict.fromkeys((*SBATCH_NAMES, "sbatch", "workdir"), check_directive)
        lines = {"setup": partial(check_quoted, shown=printable)}
        address = {"master_addr": lambda text, where: check_word(text.replace("%N", ""), where)}
        check_texts(self, "cluster.", {**quoted, **directives, **lines, **address})
        if not _TIME.fullmatch(self.time):
            what = f"time is {self.time!r}"
            raise ConfigError(what, where="cluster.time", fix="minutes, HH:MM:SS or DAYS-HH:MM:SS, in quotes")
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            what = f"{count_of(self.ranks_per_node, 'rank')} per node on {count_of(self.gpus_per_node, 'GPU')}"
            raise ConfigError(what, where="cluster.ranks_per_node, cluster.gpus_per_node", fix="one rank per GPU")
        if self.signal_lead_s >= time_limit_s(self.time):
            what = f"the ranks would be asked to stop {self.signal_lead_s:,} s before a time limit of "
            what += f"{time_limit_s(self.time):,} s"
            fix = "raise the time limit, or lower cluster.signal_lead_s to what one step and one checkpoint take"
            raise ConfigError(what, where="cluster.signal_lead_s, cluster.time", fix=fix)
        # A colon or a comma would end the path in the list of mounts.
        if self.local_dir and not re.fullmatch(r"/+[^:,/][^:,]*", self.local_dir):
            what = f"{self.local_dir!r} is not an absolute path of a folder"
            raise ConfigError(what, where="cluster.local_dir", fix="use a full path, such as /scratch/NAME")
        for option in (option for option in self.sbatch if not option.startswith("--")):
            raise ConfigError(f"{option!r} is not an option", where="cluster.sbatch", fix="write --name=value")
        for variable in (variable for variable in self.env if not _VARIABLE.fullmatch(variable)):
            raise ConfigError(f"{variable!r} is not a variable name", where="cluster.env", fix="write NAME: value")

    def check_setup(self) -> None:
        """Raise ConfigError if `setup` would absorb the lines after it; bash parses it without running anything."""
        if not self.setup:
            return
        lines = "\n".join(self.setup).split("\n")
        # Bash parses line by line, and this line, which is not run here, changes the syntax of the lines after it.
        start = lines.index("shopt -s extglob") + 1 if "shopt -s extglob" in lines else 0
        fix = "close what they open: quotes, if, for, {, (, here-documents; and end no line with a backslash"
        for options, part in (([], lines[:start]), (["-O", "extglob"] if start else [], lines[start:])):
            with os_errors_as(ConfigError, "bash cannot be started", where="cluster.setup", fix="install it"):
                command, text = ["bash", "-n", *options], "\n".join([*part, ""])
                env = {**os.environ, "LC_ALL": "C"}  # no warnings about a locale
                done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, check=False)
            reason = done.stderr.strip().partition("\n")[0].partition(": ")[2]
            if part and (len(part[-1]) - len(part[-1].rstrip("\\"))) % 2:
                reason = "the last line ends with a backslash"
            if done.returncode or reason:
                raise ConfigError(f"the lines are not complete commands: {reason}", where="cluster.setup", fix=fix)

    @property
    def copies_image(self) -> bool:
        """True if nodes copy the image; Enroot itself caches images of a registry."""
        return bool(self.local_dir) and self.image.startswith("/")


@dataclass
class SubmitConfig(CheckedSettings):
    """Settings of `harness submit` that do not belong to the experiment.

    Attributes:
        cluster: the cluster, a file of `configs/cluster/`.
        nodes: number of nodes of the job.
        run_dir: folder of a run to resume, on any number of nodes; null starts a new run.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    nodes: int = bounded(1, lowest=1, highest=100_000)
    run_dir: str | None = None


def time_limit_s(text: str) -> int:
    """Return the seconds of a time limit in sbatch's notation: `90` is minutes, `1:30` is minutes and seconds."""
    days, dash, rest = text.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    # The first of one or two numbers is minutes, unless days come before it.
    hours, minutes, seconds = (*([] if dash or len(numbers) == 3 else [0]), *numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_texts(config: Any, section: str, checks: Mapping[str, Callable[[str, str], None]]) -> None:
    """Check every text of a dataclass before it goes into a script, with its field's check or else `check_word`."""
    for one in fields(config):
        value = getattr(config, one.name)
        texts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for text in texts:
            if isinstance(text, str):
                checks.get(one.name, check_word)(text, f"{section}{one.name}")


def check_word(text: str, where: str, allowed: re.Pattern[str] = _WORD) -> None:
    """Raise ConfigError for text that the shell would not read as a word or a part of a word."""
    if not allowed.fullmatch(text):
        what = f"{text!r} has characters that the shell or sbatch would misread"
        raise ConfigError(what, where=where, fix="use letters, digits and . _ / + @ : , = - without spaces")


# For text in a `#SBATCH` line.
check_directive = partial(check_word, allowed=_DIRECTIVE)


def check_quoted(text: str, where: str, shown: Callable[[str], str] = one_line) -> None:
    """Raise ConfigError for quoted text with control characters, or line breaks, which logs do not show."""
    if shown(text) != text:
        breaks = "a line break or " * (shown is one_line)
        raise ConfigError(f"{text[:100]!r} has {breaks}a control character", where=where, fix="leave it out")
