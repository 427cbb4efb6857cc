"""From an experiment's name to a job in Slurm's queue."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.errors import ConfigError, HarnessError
from harness.launch.cluster import ClusterConfig, check_one_line
from harness.launch.preflight import code_digest
from harness.launch.script import Job
from harness.loader.corpus import corpus_paths

SCRIPT = "job.sbatch"
# Of docker/Dockerfile.
_IMAGE_WORKDIR = "/opt/harness"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Submitted:
    """A job in the queue."""

    job_id: str
    script: Path


def split_overrides(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Settings of the cluster (`cluster.time=...`), and those of the recipe.

    Raises:
        ConfigError: a setting of several lines, or one of those that the job's script sets.
    """
    for text in overrides:
        check_one_line(text, "settings")
        if text.startswith(("run_dir=", "resume=")):
            raise ConfigError(
                f"{text} is set by the job itself",
                where="settings",
                fix="runs=FOLDER says where runs are kept; each submission is a run of its own, kept over requeues",
            )
    cluster = [text for text in overrides if text.startswith("cluster.")]
    return cluster, [text for text in overrides if text not in cluster]


def plan_job(
    experiment: str,
    overrides: list[str],
    *,
    nodes: int,
    cluster: ClusterConfig,
    experiments: Path,
    run_dir: Path | None = None,
) -> Job:
    """The job that runs an experiment, or a recipe, with these settings.

    Args:
        experiment: a file of `experiments`, which `recipes.sft` runs, or the name of a recipe.
        overrides: settings of the recipe.
        run_dir: of a run to go on with, None for a new one.

    Raises:
        HarnessError: there is no such run, the recipe refuses its settings, or they are planned for another number of
            ranks.
    """
    is_file = (experiments / f"{experiment}.yaml").exists()
    module = "recipes.sft" if is_file else f"recipes.{experiment}"
    settings = [f"experiment={experiment}", *overrides] if is_file else overrides
    told = recipe_settings(module, settings)
    ranks, wanted = nodes * cluster.ranks_per_node, told.get("parallel", {}).get("ranks")
    if wanted not in (None, ranks):
        raise ConfigError(
            f"{experiment} is planned for {wanted} ranks, and {nodes} nodes of {cluster.ranks_per_node} have {ranks}",
            where="--nodes",
            fix=f"--nodes {wanted // cluster.ranks_per_node or 1} on nodes of {cluster.ranks_per_node}; or "
            f"parallel.ranks={ranks}, once `harness plan {experiment} parallel.ranks={ranks}` says that it fits",
        )
    if wanted is None:  # what does not fit so many ranks is told here, too
        recipe_settings(module, [*settings, f"parallel.ranks={ranks}"])
    weights = told.get("model", {}).get("init_from")
    weights = weights if weights and Path(weights).is_dir() else None  # else a name on a hub
    live = told["data"].get("live", {}).get("path")
    if cluster.image:
        _check_absolute([*dataset_paths(told), weights, live])
    if run_dir is not None and not run_dir.is_dir():
        raise ConfigError(
            "there is no run to go on with", where=str(run_dir), fix="leave --run-dir out to start a new one"
        )
    return Job(
        name=told["name"],
        nodes=nodes,
        module=module,
        overrides=tuple(settings),
        run_dir=str(run_dir.absolute() if run_dir else next_run_dir(Path(told["runs"]), told["name"])),
        workdir=cluster.workdir or (_IMAGE_WORKDIR if cluster.image else str(Path.cwd())),
        python=cluster.python or ("python3" if cluster.image else sys.executable),
        data=dataset_paths(told),
        weights=weights,
        live=live,
        code=code_digest() if cluster.image and cluster.preflight.same_code else "",
    )


def _check_absolute(paths: Sequence[str | None]) -> None:
    for path in paths:
        if path and "://" not in path and not Path(path).is_absolute():
            raise ConfigError(
                f"{path} would be looked for in the container's own folder",
                where="data.path, model.init_from",
                fix=f"{Path(path).absolute()}, with a folder above it among cluster.mounts",
            )


def recipe_settings(module: str, overrides: list[str]) -> dict[str, Any]:
    """All settings of a recipe that trains; a mistake is told here, and not after hours in a queue.

    Raises:
        HarnessError: what the recipe says against them, or that it cannot be started here.
    """
    command = [sys.executable, "-m", module, "--cfg", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        settings: dict[str, Any] = yaml.safe_load(done.stdout)
        if "run_dir" in settings and "data" in settings:
            return settings
    words = done.stderr.strip().splitlines()
    if words and words[0].startswith("ConfigError: "):
        where, fix = (next((one[9:] for one in words if one.startswith(f"  {name}")), "") for name in ("where", "fix"))
        raise ConfigError(words[0].partition(": ")[2], where=where, fix=fix)
    raise HarnessError(
        f"`{' '.join(command)}` does not give the settings of a run" + (f": {words[-1]}" if words else ""),
        where=module,
        fix="name a file of configs/experiment, or sft; pip install '.[train]' where packages are missing",
    )


def next_run_dir(runs: Path, name: str) -> Path:
    """`<runs>/<name>-NNN`, the first number that is free; nothing is made."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a run's folder", where="name", fix="letters, digits, dots, dashes and underscores"
        )
    numbered = re.compile(rf"{re.escape(name)}-(\d+)")
    numbers = [int(match[1]) for path in runs.glob("*") if (match := numbered.fullmatch(path.name))]
    return runs.absolute() / f"{name}-{max(numbers, default=0) + 1:03d}"


def dataset_paths(settings: dict[str, Any]) -> tuple[str, ...]:
    """Every dataset that a run with these settings opens, as they are named: the nodes look where the ranks will.

    Live chunks are none: they may be made later. Of a corpus it is the prefixes on disks.
    """
    data = settings["data"]
    if "blend_per_split" in data:
        return tuple(dict.fromkeys(path for path in corpus_paths(data) if path and "://" not in path))
    paths = [source["path"] for source in data["blend"]] or ([] if data["live"]["path"] else [data["path"]])
    paths += [data["validation_path"]] if data["validation_path"] else []
    return tuple(paths)


def submit_job(job: Job, text: str) -> Submitted:
    """Keep the script in the run's folder and give it to sbatch.

    Raises:
        HarnessError: there is no sbatch here, or it refuses the job; then no new folder is left behind.
        ConfigError: the run's folder cannot be made.
    """
    if shutil.which("sbatch") is None:
        raise HarnessError(
            "there is no sbatch here",
            where="PATH",
            fix="submit on a login node; --dry-run prints the script anywhere",
        )
    folder = Path(job.run_dir)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=not is_new)
        # Slurm makes no folders: without it a job fails before its first line, and leaves no log that would say so.
        Path(job.logs).mkdir(exist_ok=True)
        (folder / SCRIPT).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"the run's folder cannot be made: {error.strerror}",
            where=str(folder),
            fix="submit again, or name another folder with runs=",
        ) from None
    done = subprocess.run(["sbatch", "--parsable", str(folder / SCRIPT)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if is_new:
            shutil.rmtree(folder)
        raise HarnessError(
            f"sbatch refuses the job: {(done.stderr or done.stdout).strip()}",
            where="configs/cluster",
            fix="`sinfo` and `sacctmgr show assoc user=$USER` show partitions and accounts; `harness submit --dry-run` "
            "shows the script",
        )
    # "ID;CLUSTER" where there are several clusters.
    return Submitted(done.stdout.strip().partition(";")[0], folder / SCRIPT)
