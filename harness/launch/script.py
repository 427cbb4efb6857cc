"""The batch script of a job, as text: a pure function of the job and its cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.launch.blocks import (
    ENDING,
    EVERY_RANK_SEES_ALL_GPUS,
    FORWARDING,
    IN_CONTAINER,
    MEETING_POINT,
    PREFLIGHT,
    SRUN_RANKS,
    TORCHRUN_RANKS,
    fill,
)
from harness.launch.cluster import ClusterConfig, check_directive, check_one_line


@dataclass(frozen=True)
class Job:
    """A run of a recipe on so many nodes.

    Attributes:
        name: of the job; logs are named after it.
        nodes: how many.
        module: what every rank runs, such as `recipes.sft`.
        overrides: its settings but the folder and `resume`, as on its command line.
        run_dir: absolute path of the run's folder, which the job keeps over requeues.
        workdir: absolute path to run in.
        python: the interpreter.
        data: datasets that every node has to read; empty checks none.
        weights: the folder that the model begins with, if any.
        live: the folder of live chunks, if any.
        code: the digest that the nodes' code has to have; empty for any that is the same on all.
    """

    name: str
    nodes: int
    module: str
    overrides: tuple[str, ...]
    run_dir: str
    workdir: str
    python: str
    data: tuple[str, ...] = ()
    weights: str | None = None
    live: str | None = None
    code: str = ""

    def __post_init__(self) -> None:
        for text, where in ((self.name, "name"), (self.run_dir, "runs"), (self.workdir, "cluster.workdir")):
            check_directive(text, where)
        for setting in (*self.overrides, *self.data, self.weights, self.live, self.python):
            check_one_line(setting or "", "settings")

    @property
    def logs(self) -> str:
        return f"{self.run_dir}/logs"


def render(job: Job, cluster: ClusterConfig) -> str:
    """The script that `sbatch` takes; everything that a job needs is in it.

    Raises:
        ConfigError: a name or path that sbatch would read otherwise, or a setting of several lines.
    """
    harness = [job.python, "-m", "harness.cli.app"]
    parts = [
        "#!/bin/bash",
        # Texts for the shells of other nodes, lists with commas, and a function that a trap calls.
        "# shellcheck disable=SC2016,SC2054,SC2329",
        f"# {job.module} on {job.nodes} nodes, rendered by `harness submit`. To submit it by hand:",
        f"#   mkdir -p {job.logs} && sbatch FILE",
        *_directives(job, cluster),
        "",
        "set -uo pipefail",
        *cluster.setup,
        *(f"export {name}={_quoted(value)}" for name, value in cluster.env.items()),
        f"run_dir={shlex.quote(job.run_dir)}",
        f"logs={shlex.quote(job.logs)}",
        f"harness=({_words(harness)})",
        "# resume=auto: the first start finds no checkpoint, one after a requeue goes on from the newest whole one.",
        f"program=({_words(_program(job, cluster))})",
        "",
        *_steps(job, cluster),
        "",
        fill(MEETING_POINT, master_addr=cluster.master_addr.replace("%N", "$first_node")),
    ]
    parts += ["", FORWARDING]
    if cluster.preflight.enabled:
        parts += ["", _preflight(job, cluster)]
    ending = fill(ENDING, max_same=cluster.max_same_failures, limit=f"{max(60.0, cluster.preflight.timeout_s):g}")
    ranks = SRUN_RANKS if cluster.launcher == "srun" else TORCHRUN_RANKS
    parts += ["", ranks, "", ending]
    return "\n".join(parts) + "\n"


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _quoted(value: str) -> str:
    """In quotes even where no character asks for them: `NAME==mlx5_0` reads as a comparison."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _directives(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(cluster.ranks_per_node),
        "cpus-per-task": str(cluster.cpus_per_rank),
        "gpus-per-node": str(cluster.gpus_per_node or ""),
        "mem": cluster.memory,
        "time": cluster.time,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "exclude": cluster.exclude,
        # A container's own folder is named where the container is.
        "chdir": "" if cluster.image else job.workdir,
        "output": f"{job.logs}/%x-%j.out",
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value)
    if cluster.exclusive:
        yield "#SBATCH --exclusive"
    yield from (f"#SBATCH {option}" for option in cluster.sbatch)
    yield "# A node that dies, or a preemption, puts the job back into the queue; it goes on in the same logs."
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield "# B: to this script alone, which tells the ranks. Not USR1, which NCCL may catch."
    yield f"#SBATCH --signal=B:USR2@{cluster.signal_lead_s}"


def _program(job: Job, cluster: ClusterConfig) -> list[str]:
    """What every rank runs under srun; under torchrun, what its agent is told to run."""
    recipe = ["-m", job.module, *job.overrides, f"run_dir={job.run_dir}", "resume=auto"]
    if cluster.launcher == "srun":
        return [job.python, *recipe]
    agent = [f"--nnodes={job.nodes}", f"--nproc-per-node={cluster.ranks_per_node}", "--max-restarts=0", "--tee=3"]
    return [job.python, "-m", "torch.distributed.run", *agent, f"--log-dir={job.logs}/ranks", *recipe]


def _steps(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    """Arrays that a command is put behind: once on the first node, once on every node, once a rank."""
    ranks, cpus = cluster.ranks_per_node, cluster.cpus_per_rank
    container = ""
    if cluster.image:
        options = [f"--container-image={cluster.image}", f"--container-workdir={job.workdir}"]
        options += [f"--container-mounts={','.join(cluster.mounts)}"] if cluster.mounts else []
        told = ",".join(["MASTER_ADDR", "MASTER_PORT", *cluster.env])
        options += ["--no-container-mount-home", f"--container-env={told}"]
        yield fill(IN_CONTAINER, container=_words(options))
        container = ' "${container[@]}"'
    else:
        yield "# This script runs on the first node."
        yield "on_first_node=()"
    yield "# srun takes no --cpus-per-task from its job since Slurm 22.05."
    yield f"on_each_node=(srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    yield f"  --cpus-per-task={ranks * cpus}{container})"
    if cluster.launcher == "torchrun" and not cluster.gpus_per_node:
        return
    bind = f" --cpu-bind={cluster.cpu_bind}" if cluster.cpu_bind else ""
    if cluster.gpus_per_node:
        yield EVERY_RANK_SEES_ALL_GPUS
        bind += " --gpu-bind=none"
    yield f"on_each_rank=(srun --nodes={job.nodes} --ntasks={job.nodes * ranks} --ntasks-per-node={ranks}"
    yield f"  --cpus-per-task={cpus}{bind}{container})"


def _preflight(job: Job, cluster: ClusterConfig) -> str:
    limits = cluster.preflight
    needed = [("data", path) for path in job.data]
    needed += [(name, path) for name, path in (("weights", job.weights), ("live", job.live)) if path]
    expected = [
        f"--gpus={cluster.gpus_per_node}",
        f"--min-shm-mib={limits.min_shm_mib}",
        f"--min-disk-gib={limits.min_disk_gib:g}",
        f"--max-clock-offset-s={limits.max_clock_offset_s:g}",
        *([f"--code={job.code}"] if job.code else []),
    ]
    return fill(
        PREFLIGHT,
        needed="".join(f" --{name}={shlex.quote(path)}" for name, path in needed),
        timeout=f"{limits.timeout_s:g}",
        # srun itself is ended a little later, so that the nodes' own words about a timeout arrive.
        limit=f"{limits.timeout_s + 5:g}",
        expected=_words(expected),
        # With GPUs every one of them takes part, over the links that training uses.
        reduce_step="on_each_rank" if cluster.gpus_per_node else "on_each_node",
    )
