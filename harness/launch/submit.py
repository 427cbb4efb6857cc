"""Plan the job of a run, write its script and submit it."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, HarnessError, os_errors_as
from harness.launch.cluster import ClusterConfig, check_quoted
from harness.launch.preflight.probe import code_digest
from harness.launch.queue import ask_slurm, jobs_of_run
from harness.launch.script import Job
from harness.loader import CorpusConfig, DataConfig, corpus_paths
from harness.paths import numbered_runs
from harness.settings import to_plain

# As in docker/Dockerfile.
_IMAGE_WORKDIR = "/opt/harness"


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a setting with several lines, or a setting that the job sets itself."""
    for text in arguments:
        check_quoted(text, "settings")
        if text.startswith("resume="):
            fix = "omit it: run_dir=DIR resumes a run, and a submission without run_dir starts a new one"
            raise ConfigError(f"{text} is set by the job itself", where="settings", fix=fix)


def plan_job(
    module: str,
    arguments: Sequence[str],
    config: Any,
    *,
    nodes: int,
    cluster: ClusterConfig,
    run_dir: str | None,
) -> Job:
    """Plan the job that runs a recipe with the settings `config`.

    Raises ConfigError for a run that does not exist, a path outside the container's mounts, or a wrong number of ranks.
    """
    _check_ranks(config, nodes, cluster)
    is_corpus = isinstance(config.data, CorpusConfig)
    weights, live = _folder_of(config.model.init_from), () if is_corpus else tuple(config.data.live.folders)
    if run_dir is not None and not Path(run_dir).is_dir():
        raise ConfigError("there is no run to resume", where=run_dir, fix="omit run_dir to start a new one")
    runs = numbered_runs(Path(config.runs), config.name)  # checks the name, which logs use too
    folder = Path(run_dir or f"{config.runs}/{config.name}-{max(runs, default=0) + 1:03d}").absolute()
    datasets = dataset_paths(config.data)
    data = datasets if is_corpus else (*datasets, *config.data.evaluation.values())
    if cluster.image:
        named = {"data.path, data.evaluation": data, "model.init_from": [weights], "data.live.path": live}
        listed = ("per_split_data_args_path", "per_dataset_sequences_path")  # of a corpus
        named |= {f"data.{name}": [getattr(config.data, name, None)] for name in listed}
        named["data.live.tokenizer.name"] = [_folder_of(config.data.live.tokenizer.name)] if live else []
        _check_mounts({**named, "runs": [str(folder)]}, cluster)
    return Job(
        # A singleton waits for all jobs with its name, so only jobs of the same run may have the name.
        name=folder.name if cluster.successor == "singleton" else config.name,
        nodes=nodes,
        module=module,
        overrides=tuple(arguments),
        run_dir=str(folder),
        workdir=cluster.workdir or (_IMAGE_WORKDIR if cluster.image else str(Path.cwd())),
        python=cluster.python or ("python3" if cluster.image else sys.executable),
        data=datasets,
        # Megatron's indices of a corpus contain the paths of its pairs.
        copied=() if is_corpus else data,
        weights=weights,
        live=live,
        code=code_digest() if cluster.image and cluster.preflight.same_code else "",
    )


def _folder_of(name: str | None) -> str | None:
    """Return `name` if it is the path of a folder, or None for an id on the hub."""
    return name if name and (Path(name).is_dir() or Path(name).is_absolute()) else None


def _check_ranks(config: Any, nodes: int, cluster: ClusterConfig) -> None:
    ranks, planned = nodes * cluster.ranks_per_node, config.parallel.ranks
    if planned in (None, ranks):
        return
    name, (whole, rest) = config.name, divmod(planned, cluster.ranks_per_node)
    by_nodes = f"nodes={whole} on nodes of {cluster.ranks_per_node} or " if not rest else ""
    what = f"{name} is planned for {planned} ranks, and {nodes} node{'s' * (nodes > 1)} of {cluster.ranks_per_node} "
    what += f"ha{'ve' if nodes > 1 else 's'} {ranks}"
    fix = f"{by_nodes}cluster=NAME of nodes that {planned} ranks fill, or parallel.ranks={ranks} if "
    fix += f"`harness plan {name} parallel.ranks={ranks}` finds that it fits"
    raise ConfigError(what, where="nodes", fix=fix)


def _check_mounts(paths: Mapping[str, Iterable[str | None]], cluster: ClusterConfig) -> None:
    split = [mount.split(":") for mount in (*cluster.mounts, *([cluster.local_dir] if cluster.local_dir else []))]
    # Folders in the container, each with the folder of the node that is mounted there.
    mounts = {(parts[1] if len(parts) > 1 else parts[0]): parts[0] for parts in split}
    for setting, named in paths.items():
        for path in named:
            if not path or "://" in path:
                continue
            if not Path(path).is_absolute():
                what = f"{path} is relative, and would be looked up in the container's own folder"
                fix = f"set it to {Path(path).absolute()}, and list a folder above it in cluster.mounts"
                raise ConfigError(what, where=setting, fix=fix)
            # `/shared/../home` is below the mount `/shared` only by its text.
            above = [target for target in mounts if Path(os.path.normpath(path)).is_relative_to(target)]
            # The script and commands outside the container must find the run at the same path.
            if not above or (setting == "runs" and mounts[max(above, key=len)] != max(above, key=len)):
                shown = ", ".join(f"{source}:{target}" for target, source in mounts.items()) or "there are none"
                what = f"no mount of the container shows {path}{' at the same path' if above else ''}: {shown}"
                place = Path(path).parent if setting == "runs" else path
                fix = f"add one to cluster.mounts, such as {place}:{place}"
                raise ConfigError(what, where=f"{setting}, cluster.mounts", fix=fix)
            target = max(above, key=len)
            # The path, and the entries of its folder, may be links to places outside the mounts.
            places = [f"{mounts[target]}/{os.path.relpath(path, target)}"]
            with suppress(OSError):  # not a folder, or missing on this host
                places += [entry.path for entry in itertools.islice(os.scandir(places[0]), 1000) if entry.is_symlink()]
            for place in map(os.path.normpath, places):
                real = Path(os.path.realpath(place))
                if not any(real.is_relative_to(os.path.realpath(source)) for source in mounts.values()):
                    what = f"{place} is a link to {real}, which no mount of the container shows"
                    fix = f"add a mount of {real.parent}, or copy it"
                    raise ConfigError(what, where=f"{setting}, cluster.mounts", fix=fix)


def dataset_paths(data: DataConfig | CorpusConfig) -> tuple[str, ...]:
    """Return the datasets that a run opens, except live chunks, which may not exist yet, and a corpus in a bucket."""
    if isinstance(data, CorpusConfig):
        return tuple(dict.fromkeys(path for path in corpus_paths(to_plain(data)) if "://" not in path))
    paths = [source.path for source in data.blend] or ([] if data.live.folders else [data.path])
    return (*paths, *filter(None, [data.validation_path]))


def refuse_second_job(run_dir: Path) -> None:
    """Raise ConfigError if a job of the run is in the queue; the script of a second job would end at once."""
    if shutil.which("squeue") is None:
        return  # sbatch is missing too, which is refused later
    jobs = jobs_of_run(run_dir)
    if jobs:
        fix = f"wait for it (`harness status {run_dir}`), or end it first: `harness cancel {run_dir}`"
        raise ConfigError(f"this run is already in the queue: {'; '.join(map(str, jobs))}", where=str(run_dir), fix=fix)


def submit_job(job: Job, text: str, *, is_private: bool) -> str:
    """Write the script to the run's folder, submit it with sbatch, and return the id of the job.

    A script that contains values of the environment is private: only its owner can read it. Raises HarnessError, and
    removes a new folder again, if sbatch is not installed here or refuses the job.
    """
    folder = Path(job.run_dir)
    is_new = not folder.exists()
    fix = "submit again, or set runs= to another folder"
    with os_errors_as(ConfigError, "the run's folder cannot be created", where=folder, fix=fix):
        folder.mkdir(parents=True, exist_ok=not is_new)
        # Slurm creates no folders: without this one, a job would fail before its first line, and without a log.
        Path(job.logs).mkdir(exist_ok=True)
        script = os.open(job.script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if is_private else 0o666)
        with os.fdopen(script, "w") as file:
            if is_private:
                os.fchmod(script, 0o600)
            file.write(text)
    try:
        printed = ask_slurm("sbatch", "--parsable", job.script)
    except HarnessError as error:
        if is_new:
            shutil.rmtree(folder)
        fix = "submit on a login node; `sinfo` and `sacctmgr show assoc user=$USER` list partitions and accounts; "
        fix += "`harness submit ... --dry-run` prints the script anywhere"
        raise HarnessError(error.what, where=error.where, fix=fix) from None
    # "ID;CLUSTER" if there are several clusters.
    return printed.strip().partition(";")[0]
