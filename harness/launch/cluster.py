"""What a cluster is like: the settings of `configs/cluster/`. One file a cluster; a job adds only what it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.errors import ConfigError

LAUNCHERS = ("srun", "torchrun")
# Slurm reads `#SBATCH` lines with rules of its own; these characters mean the same to it and to the shell.
_DIRECTIVE = re.compile(r"[A-Za-z0-9._/+@:,=\[\]&|*()-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass
class PreflightConfig:
    """What every node has to show before the first step.

    Attributes:
        enabled: false starts the ranks at once.
        timeout_s: until a node that has not answered is named. Pyxis unpacks the image within this time too.
        min_shm_mib: of /dev/shm, through which loader workers hand over their batches.
        min_disk_gib: free where the run's folder is.
        max_clock_offset_s: between a node and the first one.
        same_code: an image has to hold the code and the configs of the folder that submits.
    """

    enabled: bool = True
    timeout_s: float = 40.0
    min_shm_mib: int = 1024
    min_disk_gib: float = 10.0
    max_clock_offset_s: float = 2.0
    same_code: bool = True

    def __post_init__(self) -> None:
        if not 5 <= self.timeout_s <= 3600:
            raise ConfigError(
                f"timeout_s is {self.timeout_s:g}", where="cluster.preflight.timeout_s", fix="5 to 3600 seconds"
            )


@dataclass
class ClusterConfig:
    """How jobs are started on one cluster.

    Attributes:
        account, partition, qos, constraint, reservation, exclude: of sbatch; empty leaves Slurm's default.
        time: limit of one stretch of the job, as sbatch takes it; a run that is not done is checkpointed and requeued.
        gpus_per_node: 0 on nodes without.
        ranks_per_node: one a GPU where there are GPUs.
        cpus_per_rank: a node's cores divided by its ranks; loader workers live on them.
        memory: of a node, as sbatch takes it; "0" is all of it, empty is Slurm's default.
        exclusive: no other job on the nodes.
        sbatch: further options, each as `--name=value`.
        launcher: `srun` starts every rank; `torchrun` starts one agent a node, which starts the ranks.
        python: the interpreter of the job, the same path on every node; empty is that of `harness submit`, or
            `python3` in a container.
        image: of the container, for Pyxis (`/shared/x.sqsh` or `registry#name:tag`); empty runs on the node itself.
        mounts: `SOURCE:TARGET[:flags]`; the run's folder and the datasets have to be among them.
        workdir: where the job runs; empty is the folder of `harness submit`, or the project's in a container.
        setup: shell lines before anything else, such as `module load`.
        env: variables of every rank.
        cpu_bind: of srun, such as `cores`; empty is the cluster's own.
        master_addr: how the other nodes reach the first one; `%N` stands for its name.
        signal_lead_s: how long before the time limit the ranks are told to checkpoint; more than a step and a
            checkpoint take.
        max_same_failures: so often a job may fail in the same way at the same step before it stays down.
    """

    account: str = ""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""
    time: str = "04:00:00"
    gpus_per_node: int = 0
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    memory: str = ""
    exclusive: bool = False
    sbatch: list[str] = field(default_factory=list)
    launcher: str = "srun"
    python: str = ""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    workdir: str = ""
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cpu_bind: str = ""
    master_addr: str = "%N"
    signal_lead_s: int = 120
    max_same_failures: int = 3
    preflight: PreflightConfig = field(default_factory=PreflightConfig)

    def __post_init__(self) -> None:
        for name in ("account", "partition", "qos", "constraint", "reservation", "exclude", "memory"):
            check_directive(getattr(self, name), f"cluster.{name}")
        if not _TIME.fullmatch(self.time):
            raise ConfigError(
                f"time is {self.time!r}", where="cluster.time", fix="minutes, HH:MM:SS or DAYS-HH:MM:SS, in quotes"
            )
        for name, low in {
            "gpus_per_node": 0,
            "ranks_per_node": 1,
            "cpus_per_rank": 1,
            "signal_lead_s": 1,
            "max_same_failures": 1,
        }.items():
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=f"cluster.{name}", fix=f"a number of {low} or more"
                )
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise ConfigError(
                f"{self.ranks_per_node} ranks a node on {self.gpus_per_node} GPUs",
                where="cluster.ranks_per_node",
                fix="at most one rank a GPU",
            )
        if self.launcher not in LAUNCHERS:
            raise ConfigError(
                f"launcher {self.launcher!r} is unknown", where="cluster.launcher", fix=f"one of {', '.join(LAUNCHERS)}"
            )
        for option in self.sbatch:
            check_directive(option, "cluster.sbatch")
            if not option.startswith("--"):
                raise ConfigError(f"{option!r} is no option", where="cluster.sbatch", fix="--name=value")
        for variable in self.env:
            if not _VARIABLE.fullmatch(variable):
                raise ConfigError(f"{variable!r} cannot name a variable", where="cluster.env", fix="NAME: value")
        for text in (*self.env.values(), *self.mounts, self.image, self.workdir, self.python, self.master_addr):
            check_one_line(text, "cluster")
        if self.mounts and not self.image:
            raise ConfigError("there are mounts and no image", where="cluster.mounts", fix="name cluster.image")


@dataclass
class SubmitConfig:
    """Settings of `harness submit` that are not the experiment's."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def check_directive(text: str, where: str) -> None:
    """Raise ConfigError for what cannot stand in a `#SBATCH` line."""
    if not _DIRECTIVE.fullmatch(text):
        raise ConfigError(
            f"{text!r} has characters that sbatch would read otherwise",
            where=where,
            fix="letters, digits and . _ / + @ : , = - without spaces",
        )


def check_one_line(text: str, where: str) -> None:
    """Raise ConfigError for a text of several lines: a script's log, and Slurm's, show a job's words line by line."""
    if any(character in text for character in "\n\r\0"):
        raise ConfigError(f"{text[:100]!r} has a line break in it", where=where, fix="one line")
