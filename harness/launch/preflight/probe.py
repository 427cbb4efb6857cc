"""Asks one node what the preflight needs to know. It prints a line of JSON a check, which `judge` reads.

All checks of a node run side by side, and one that hangs (a file system that is gone does not answer, nor can it be
interrupted) is told as such when the time is over.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

import harness
from harness.errors import HarnessError
from harness.indexed import BIN, IDX, MappedIndex, with_suffix
from harness.launch.preflight.meet import check_meeting, check_own_name
from harness.loader.datasets import DataConfig, open_datasets

PACKAGES = ("torch", "megatron-core", "transformer-engine", "megatron-sft-harness", "numpy", "pyarrow")
Facts = dict[str, Any]
Check = Callable[[], Facts]


@dataclass(frozen=True)
class Place:
    """This node in the job.

    Attributes:
        node: its name in Slurm's node lists.
        number: 0 for the first.
        num_nodes: of the job.
        attempt: differs between jobs, and between the starts of one.
    """

    node: str
    number: int
    num_nodes: int
    attempt: str


def place_in_slurm() -> Place:
    """This process's node, as the variables of its step say."""
    said = os.environ
    return Place(
        node=said.get("SLURMD_NODENAME", platform.node()),
        number=int(said.get("SLURM_NODEID", "0")),
        num_nodes=int(said.get("SLURM_NNODES", said.get("SLURM_JOB_NUM_NODES", "1"))),
        attempt=f"{said.get('SLURM_JOB_ID', os.getpid())}.{said.get('SLURM_RESTART_COUNT', '0')}",
    )


def run_checks(checks: Mapping[str, Check], *, node: str, timeout_s: float, rank: int | None = None) -> None:
    """Run all of `checks` side by side and print what each found, or that it did not end in time."""
    who: Facts = {"node": node} if rank is None else {"node": node, "rank": rank}
    printing = threading.Lock()
    over: set[str] = set()

    def say(name: str, **told: Any) -> None:
        with printing:
            over.add(name)
            print(json.dumps({**who, "check": name, **told}), flush=True)

    def run(name: str, check: Check) -> None:
        try:
            say(name, facts=check())
        except HarnessError as error:
            say(name, error=error.what, where=error.where, fix=error.fix)
        except Exception as error:
            say(name, error=f"{type(error).__name__}: {error}", where="", fix="")

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in checks.items()]
    ends = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    for name in checks:
        if name not in over:
            say(name, error=f"no answer within {timeout_s:g} s", where="", fix="", late=True)


def node_checks(
    place: Place, *, run_dir: Path, data: list[str], weights: str | None, live: str | None, timeout_s: float
) -> dict[str, Check]:
    """The checks of this node by name; those that wait for another node give up before `timeout_s`."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    return {
        "versions": read_versions,
        "gpus": read_gpus,
        "shm": lambda: {"mib": shutil.disk_usage("/dev/shm").total >> 20},
        "disk": lambda: {"gib": shutil.disk_usage(_nearest(run_dir)).free / 2**30},
        "run folder": lambda: share_folder(run_dir, place, timeout_s=timeout_s / 2),
        "own name": lambda: check_own_name(place.num_nodes),
        "first node": lambda: check_meeting(
            address,
            port,
            name=place.node,
            attempt=place.attempt,
            number=place.number,
            num_nodes=place.num_nodes,
            timeout_s=timeout_s - 2,
        ),
        **{f"dataset {path}": partial(read_dataset, path) for path in data},
        **({f"weights {weights}": lambda: read_weights(Path(weights))} if weights else {}),
        # The producer may make it later; nodes that see it before others do not share it.
        **({f"live chunks {live}": lambda: {"folder": "there" if Path(live).is_dir() else "missing"}} if live else {}),
    }


def read_versions() -> Facts:
    """Versions of what a run depends on, and a digest of the harness's own code."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    return {**found, "code": code_digest(), "interpreter": sys.executable, "folder": str(Path.cwd())}


def code_digest() -> str:
    """Of the code and the configs that a run is made of."""
    code = xxhash.xxh3_64()
    root = Path(harness.__file__).parents[1]
    for folder, pattern in (("harness", "*.py"), ("recipes", "*.py"), ("configs", "*.yaml")):
        for path in sorted((root / folder).rglob(pattern)):
            code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return code.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def read_gpus() -> Facts:
    """GPUs and driver, as nvidia-smi tells; none where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": [], "driver": "none"}
    asked = "name,driver_version,memory.used"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or any(len(row) != 3 for row in rows):
        raise HarnessError(
            f"nvidia-smi ends with code {done.returncode}: {(done.stdout + done.stderr).strip()[:300]}",
            fix="a GPU or its driver has failed: drain the node",
        )
    gpus = [{"name": name, "used_mib": int(used) if used.isdecimal() else 0} for name, _, used in rows]
    return {"gpus": gpus, "driver": rows[0][1] if rows else "none"}


def share_folder(run_dir: Path, place: Place, *, timeout_s: float) -> Facts:
    """See in the run's folder what the first node has written there, and write to it.

    Raises:
        HarnessError: it is not the same folder on all nodes, or cannot be written to.
    """
    token = run_dir / "logs" / "preflight.token"
    try:
        if place.number == 0:
            token.parent.mkdir(parents=True, exist_ok=True)
            written = token.with_name("preflight.token.new")
            written.write_text(place.attempt)
            written.replace(token)
        own = run_dir / f"_preflight-{place.node}"
        own.write_text("")
        own.unlink()
    except FileNotFoundError:
        raise _not_shared(run_dir, "there is no such folder here") from None
    except OSError as error:
        raise HarnessError(
            f"the run's folder cannot be written to: {error.strerror}",
            where=str(run_dir),
            fix="runs=FOLDER on a file system that every node may write to",
        ) from None
    ends = time.monotonic() + timeout_s
    while not token.exists() or token.read_text() != place.attempt:
        if time.monotonic() > ends:
            raise _not_shared(run_dir, "what the first node wrote there does not appear")
        time.sleep(0.1)
    return {}


def _not_shared(run_dir: Path, what: str) -> HarnessError:
    return HarnessError(
        f"the run's folder is not shared: {what}",
        where=str(run_dir),
        fix="runs=FOLDER on a file system that all nodes mount (in a container: among cluster.mounts)",
    )


def read_dataset(path: str) -> Facts:
    """The fingerprint of a dataset, whose first and last pack are read; of a pair of a corpus, its sizes."""
    if with_suffix(Path(path), IDX).is_file():
        index = MappedIndex(with_suffix(Path(path), IDX))
        return {"sequences": index.header.num_sequences, "bytes": with_suffix(Path(path), BIN).stat().st_size}
    data = open_datasets(DataConfig(path=path))
    data.train.read([0, len(data.train) - 1])
    return {"fingerprint": data.train.fingerprint, "packs": len(data.train)}


def read_weights(folder: Path) -> Facts:
    """How many files a model's folder has, and their bytes."""
    try:
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise HarnessError(
            f"cannot be read: {error.strerror}",
            where=str(folder),
            fix="mount it on every node (in a container: among cluster.mounts)",
        ) from None
    return {"files": len(sizes), "bytes": sum(sizes)}


def _nearest(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())
