"""Render the batch script of a job: a pure function of the job and its cluster.

The parts that all scripts share are in `shell`, with `@name@` as placeholders for a job's values; `render` assembles
them. Six complete scripts are kept in `tests/golden/sbatch`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arguments import quote_value
from harness.launch.cluster import SBATCH_NAMES, SUCCESSORS, ClusterConfig, check_directive, check_quoted, check_texts
from harness.printing import count_of

_SHELL = Path(__file__).parent / "shell"


@dataclass(frozen=True)
class Job:
    """One run of a recipe on a number of nodes.

    Attributes:
        overrides: settings of the recipe in the form of its command line, without `run_dir` and `resume`.
        run_dir: absolute path of the run's folder, which stays the same across requeues.
        workdir: absolute path of the working directory.
        data: datasets that every node must be able to read; empty checks none.
        copied: datasets that each node copies to its own disk if `cluster.local_dir` is set.
        code: required digest of the code on the nodes; empty accepts any code that is the same on all nodes.
    """

    name: str
    nodes: int
    module: str
    overrides: tuple[str, ...]
    run_dir: str
    workdir: str
    python: str
    data: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    weights: str | None = None
    live: tuple[str, ...] = ()
    code: str = ""

    def __post_init__(self) -> None:
        directives = dict.fromkeys(("name", "run_dir", "workdir"), check_directive)
        quoted = dict.fromkeys(("overrides", "data", "copied", "weights", "live", "python"), check_quoted)
        check_texts(self, "", {**directives, **quoted})

    @property
    def logs(self) -> str:
        return f"{self.run_dir}/logs"

    @property
    def script(self) -> str:
        return f"{self.run_dir}/job.sbatch"


def render(job: Job, cluster: ClusterConfig) -> str:
    """Return the complete batch script of the job, for `sbatch`."""
    cluster.check_setup()
    address = cluster.master_addr.replace("%N", "$first_node")
    own = {"nodes": job.nodes, "ranks": cluster.ranks_per_node}
    train_on, replace = (' "${train_on[@]}"', "  replace_failed\n") if cluster.spares else ("", "")
    restarts = max(cluster.restarts, cluster.spares)
    copied = cluster.local_dir and (job.copied or job.weights)
    copy = "  copy_to_nodes\n" if copied else ""
    of = f" of {restarts}" if restarts else ""  # a run that excludes a slow node restarts anyway
    preflight = cluster.preflight
    ending = {"limit": f"{max(60.0, preflight.timeout_s):g}", "replace": replace, "of": of, "copy": copy}
    what, mark = ("rank", "t") if cluster.launcher == "srun" else ("node", "n")
    image = "copy_image" if cluster.copies_image else "make_local_dir"
    sections = [
        [
            "#!/bin/bash",
            # Disabled for code that runs in shells of other nodes, lists with commas, and a function that a trap calls.
            "# shellcheck disable=SC2016,SC2054,SC2329",
            f"# {job.module} on {count_of(job.nodes, 'node')}, rendered by `harness submit`. To submit it by hand:",
            f"#   mkdir -p {job.logs} && sbatch FILE",
            *_directives(job, cluster),
        ],
        _variables(job, cluster),
        _steps(job, cluster),
        [part("controller")],
        [part("claim")],
        # A lock per port separates jobs of this harness; the kernel releases it when the script's shell ends. Only
        # testing the port would leave a gap until rank 0 listens.
        [part("rendezvous", master_addr=address)],
        [forwarding(cluster)],
        [part("spares", **own, master_addr=address)] if cluster.spares else [],
        [part(image, image=shlex.quote(cluster.image), local=cluster.local_dir)]
        if cluster.local_dir and cluster.image
        else [],
        [] if cluster.successor == "none" else ["submit_successor &"],
        [part("judge", limit=f"{preflight.timeout_s + 5:g}")] if preflight.enabled or copied else [],
        [_preflight(job, cluster)] if preflight.enabled else [],
        ["[[ ${train_on[*]:-} ]] || choose_nodes || run_again"] if cluster.spares else [],
        [_copies(job, cluster, train_on)] if copied else [],
        # The command that starts a rank or a node's agent, and the function that runs it on all nodes.
        [
            part(f"start_{what}"),
            part("run_ranks", step=f"on_each_{what}", what=what, number=f"%{mark}", train_on=train_on),
        ],
        [part("ending", max_same=cluster.max_same_failures, restarts=restarts, **ending)],
    ]
    return "\n\n".join(text for lines in sections if (text := "\n".join(lines))) + "\n"


def _variables(job: Job, cluster: ClusterConfig) -> list[str]:
    # Quoted even if no character requires it: `NAME==mlx5_0` looks like a comparison.
    values = {name: value.replace("'", "'\"'\"'") for name, value in cluster.env.items()}
    binds = cluster.cpu_bind not in ("", "no", "none")
    program = ["-m", job.module, *job.overrides, f"run_dir={quote_value(job.run_dir)}", "resume=auto"]
    if cluster.launcher == "torchrun":
        agent = [f"--nnodes={job.nodes}", f"--nproc-per-node={cluster.ranks_per_node}", "--max-restarts=0", "--tee=3"]
        program = ["-m", "torch.distributed.run", *agent, f"--log-dir={job.logs}/ranks", *program]
    return [
        "set -uo pipefail",
        *(["set +u", *cluster.setup, "set -u"] if cluster.setup else []),  # conda's scripts read unset variables
        *(f"export {name}='{value}'" for name, value in values.items()),
        f"run_dir={shlex.quote(job.run_dir)}",
        f"logs={shlex.quote(job.logs)}",
        f"harness=({shlex.join([job.python, '-m', 'harness'])})",
        "# resume=auto: the first attempt finds no checkpoint; later ones resume from the newest complete one.",
        f"program=({shlex.join([job.python, *program])})",
        *([f"export HARNESS_LOCAL_DIR={cluster.local_dir}"] if cluster.local_dir else []),
        # srun binds the ranks that it starts.
        *(["export HARNESS_BIND_RANKS=1"] if cluster.launcher == "torchrun" and binds else []),
    ]


def forwarding(cluster: ClusterConfig) -> str:
    """Return the shell functions that forward signals to the ranks, requeue the job, and submit its successor."""
    dependency = SUCCESSORS[cluster.successor] or SUCCESSORS["afterany"]  # for use after a refused requeue
    spare = 'choose_nodes "$slow"; then\n    here=true\n  elif ' if cluster.spares else ""
    return part("forwarding", exclude=shlex.quote(cluster.exclude), dependency=dependency, spare=spare)


def part(name: str, /, **values: object) -> str:
    """Return a part of the script from `shell`, with `@name@` replaced by values."""
    text = (_SHELL / f"{name}.bash").read_text().removesuffix("\n")
    return re.sub("@(\\w+)@", lambda match: str(values.get(match[1], match[0])), text)


def _directives(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes + cluster.spares),
        "ntasks-per-node": str(cluster.ranks_per_node),
        "cpus-per-task": str(cluster.cpus_per_rank),
        "gpus-per-node": str(cluster.gpus_per_node or ""),
        "mem": cluster.memory,
        "time": cluster.time,
        **{name: getattr(cluster, name) for name in SBATCH_NAMES},
        # The folder inside a container is an option of the container.
        "chdir": "" if cluster.image else job.workdir,
        "output": f"{job.logs}/%x-%j.out",
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value)
    if cluster.exclusive:
        yield "#SBATCH --exclusive"
    yield from (f"#SBATCH {option}" for option in cluster.sbatch)
    yield "# A node failure or a preemption requeues the job, which appends to the same logs."
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    if cluster.spares:
        yield "# The job outlives a node that fails: a spare one takes its place."
        yield "#SBATCH --no-kill"
    yield "# B: only this script gets the signal and passes it on to the ranks. Not USR1, which NCCL may catch."
    yield f"#SBATCH --signal=B:USR2@{cluster.signal_lead_s}"


def _steps(job: Job, cluster: ClusterConfig) -> Iterable[str]:
    """Yield the shell arrays that prefix a command to run it on the first node, once per node, or once per rank."""
    ranks, cpus = cluster.ranks_per_node, cluster.cpus_per_rank
    container = ""
    if cluster.image:
        options = [] if cluster.copies_image else [f"--container-image={cluster.image}"]
        options += [f"--container-workdir={job.workdir}"]
        local = [f"{cluster.local_dir}:{cluster.local_dir}"] if cluster.local_dir else []
        options += [f"--container-mounts={','.join([*cluster.mounts, *local])}"] if cluster.mounts or local else []
        names = ",".join(["MASTER_ADDR", "MASTER_PORT", *cluster.env])
        options += ["--no-container-mount-home", f"--container-env={names}"]
        options += ["--container-writable"] if cluster.container_writable else []
        # All steps of the job and of its restarts on a node share the container with this name.
        name = ' --container-name="harness-$SLURM_JOB_ID"' if cluster.container_name else ""
        yield part("in_container", container=shlex.join(options) + name)
        container = ' "${container[@]}"'
    else:
        yield "# This script runs on the first node."
        yield "on_first_node=()"
    if cluster.mpi:
        yield f"export SLURM_MPI_TYPE={cluster.mpi}"
    yield "# Since Slurm 22.05, srun does not inherit --cpus-per-task from its job."
    overlap = " --overlap" if cluster.spares else ""
    if overlap:
        yield "# --overlap: a step whose node was lost holds the other nodes until Slurm has given it up."
    # --input=none: no rank reads standard input.
    yield f"on_each_node=(srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1{overlap}"
    yield f"  --cpus-per-task={ranks * cpus} --input=none{container})"
    if cluster.launcher == "torchrun" and not cluster.gpus_per_node:
        return
    bind = f" --cpu-bind={cluster.cpu_bind}" if cluster.cpu_bind else ""
    if cluster.gpus_per_node:
        yield part("every_rank_sees_all_gpus")
        bind += " --gpu-bind=none"
    yield f"on_each_rank=(srun --nodes={job.nodes} --ntasks={job.nodes * ranks} --ntasks-per-node={ranks}{overlap}"
    yield f"  --cpus-per-task={cpus} --input=none{bind}{container})"


def _list(paths: Sequence[str]) -> str:
    """Return paths as a list for a command line; a path with a comma is quoted."""
    return "[" + ",".join(f'"{path}"' if "," in path else path for path in paths) + "]"


def _preflight(job: Job, cluster: ClusterConfig) -> str:
    limits = cluster.preflight
    needed = _needed(job.data, job.weights)
    needed += [f"data.live.path={_list(job.live)}"] if job.live else []
    of_hosts = ("min_shm_mib", "min_disk_gib", "max_clock_offset_s", "min_inodes", "min_read_mib_s")
    of_links = ("min_node_gb_s", "min_pair_gb_s", "min_all_gb_s", "min_gemm_tflops")
    expected = [
        f"cluster.gpus_per_node={cluster.gpus_per_node}",
        *(f"cluster.preflight.{name}={getattr(limits, name)}" for name in of_hosts),
        *([f"code={job.code}"] if job.code else []),
    ]
    rates = [f"cluster.preflight.{name}={getattr(limits, name)}" for name in of_links]
    tasks = cluster.ranks_per_node if cluster.gpus_per_node else 1
    every, spares = job.nodes + cluster.spares, bool(cluster.spares)
    return part(
        "preflight",
        failed=_without_failed(cluster, "preflight"),
        # Includes spare nodes; srun uses the last of two equal options.
        all_nodes=f" --nodes={every} --ntasks={every}" if spares else "",
        all_tasks=f" --nodes={every} --ntasks={every * tasks}" if spares else "",
        rates=shlex.join(rates),
        tasks=tasks,
        needed="".join(f" {shlex.quote(setting)}" for setting in needed),
        timeout=f"{limits.timeout_s:g}",
        # srun itself is stopped later, so that nodes that start slowly can report their own timeouts.
        limit=f"{limits.timeout_s + 20:g}",
        expected=shlex.join(expected),
        # With GPUs, every GPU takes part, over the links that training uses.
        reduce_step="on_each_rank" if cluster.gpus_per_node else "on_each_node",
    )


def _needed(data: Sequence[str], weights: str | None) -> list[str]:
    return ([f"data.path={_list(data)}"] if data else []) + ([f"model.init_from={weights}"] if weights else [])


def _without_failed(cluster: ClusterConfig, step: str) -> str:
    """Return the commands for failed nodes of a step before training: replace them, requeue without them, or end."""
    file = f'"$logs/{step}-$SLURM_JOB_ID.jsonl.failed"'
    requeue = f"leave_out {file} && run_again; " if cluster.preflight.exclude_failed else ""
    otherwise = f'{requeue}echo "{step}: job $SLURM_JOB_ID does not start" >&2; end_run 1'
    return f"choose_nodes {file} || {{ {otherwise}; }}" if cluster.spares else otherwise


def _copies(job: Job, cluster: ClusterConfig, train_on: str) -> str:
    names = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)'
    return part(
        "copy",
        nodes='$(IFS=, && echo "${train_nodes[*]}")' if cluster.spares else names,
        train_on=train_on,
        local=cluster.local_dir,
        needed="".join(f" {shlex.quote(setting)}" for setting in _needed(job.copied, job.weights)),
        timeout=f"{cluster.preflight.timeout_s:g}",
        failed=_without_failed(cluster, "copies"),
    )
