"""Check one node and its connection to the others, and print a line of JSON per check for `judge`.

All checks of a node run concurrently. A check that hangs, for example on a file system that does not answer and cannot
be interrupted, is reported at the timeout.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

import harness
from harness.errors import FormatError, HarnessError, installed_versions, os_errors_as
from harness.formats import PackReader
from harness.indexed.index import BIN, IDX, MappedIndex, with_suffix
from harness.launch.preflight.hardware import read_free_space, read_gpus, read_ports, read_rate
from harness.launch.preflight.judge import COPY_OF
from harness.launch.ranks import NodePlace
from harness.loader import DataConfig, open_datasets
from harness.printing import print_text
from harness.settings import CONFIGS
from harness.storage import is_uri, open_folder, read_checksums
from harness.storage.local_copies import LocalCopy, copy_to_node

PACKAGES = ("torch", "megatron-core", "transformer-engine", "megatron-sft-harness", "numpy", "pyarrow")
Facts = dict[str, Any]
Check = Callable[[], Facts]
_ONE_EXCHANGE_S = 3.0


def run_checks(checks: Mapping[str, Check], *, node: str, timeout_s: float, rank: int | None = None) -> None:
    """Run `checks` concurrently, and print the facts or the error of each; one not done in `timeout_s` is an error."""
    source: Facts = {"node": node} if rank is None else {"node": node, "rank": rank}
    printing = threading.Lock()
    reported: set[str] = set()

    def report(name: str, **outcome: Any) -> None:
        with printing:
            reported.add(name)
            print_text(json.dumps({**source, "check": name, **outcome}), flush=True)

    def run(name: str, check: Check) -> None:
        try:
            report(name, facts=check())
        except HarnessError as error:
            report(name, error=error.what, where=error.where, fix=error.fix)
        except Exception as error:
            report(name, error=f"{type(error).__name__}: {error}", where="", fix="")

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for name in checks:
        if name not in reported:
            report(name, error=f"no answer within {timeout_s:g} s", where="", fix="", late=True)


def node_checks(
    place: NodePlace, *, run_dir: Path, data: list[str], weights: str | None, live: list[str], timeout_s: float
) -> dict[str, Check]:
    """Return the checks of this node by name; those that wait for another node give up before `timeout_s`."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    return {
        "versions": read_versions,
        "gpus": read_gpus,
        "shm": lambda: {"mib": shutil.disk_usage("/dev/shm").total >> 20},
        "infiniband": read_ports,
        "disk": partial(read_free_space, run_dir),
        "run folder": lambda: share_folder(run_dir, place, timeout_s=timeout_s / 2),
        "own name": lambda: check_own_name(place.num_nodes),
        "first node": lambda: check_rendezvous(address, port, place, timeout_s=timeout_s - 2),
        **{f"dataset {path}": partial(read_dataset, path) for path in data},
        **{
            f"read rate of {path}": partial(read_rate, path)
            for path in [*data, *filter(None, [weights])]
            if Path(path).exists()
        },
        **({f"weights {weights}": lambda: read_weights(Path(weights))} if weights else {}),
        # The producer may create it later; if only some nodes see it, it is not shared.
        **{f"live chunks {path}": partial(_find_folder, path) for path in live},
    }


def _find_folder(path: str) -> Facts:
    is_there = bool(open_folder(path).names()) if is_uri(path) else Path(path).is_dir()
    return {"folder": "there" if is_there else "missing"}


def read_versions() -> Facts:
    """Return the versions of the packages that a run depends on, and the digest of the harness's own code."""
    versions = {"python": platform.python_version(), **dict.fromkeys(PACKAGES, "none"), **installed_versions(PACKAGES)}
    return {**versions, "code": code_digest(), "interpreter": sys.executable, "folder": str(Path.cwd())}


def code_digest() -> str:
    """Return a digest of the code and configs of this installation; it is equal for a checkout and its wheel."""
    code = xxhash.xxh3_64()
    root = Path(harness.__file__).parents[1]
    for folder, pattern in ((root / "harness", "*.py"), (root / "recipes", "*.py"), (CONFIGS, "*.yaml")):
        for path in sorted(folder.rglob(pattern)):
            code.update(f"{folder.name}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return code.hexdigest()


def share_folder(run_dir: Path, place: NodePlace, *, timeout_s: float) -> Facts:
    """Write to the run's folder, and wait for the file that the first node writes there."""
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
        raise _not_shared(run_dir, "it does not exist here") from None
    except OSError as error:
        fix = "set runs=FOLDER to a folder on a file system that every node can write to"
        raise HarnessError(f"the run's folder is not writable: {error.strerror}", where=str(run_dir), fix=fix) from None
    deadline = time.monotonic() + timeout_s
    while not token.exists() or token.read_text() != place.attempt:
        if time.monotonic() > deadline:
            raise _not_shared(run_dir, "a file that the first node wrote there does not appear here")
        time.sleep(0.1)
    return {}


def _not_shared(run_dir: Path, reason: str) -> HarnessError:
    fix = "set runs=FOLDER to one that all nodes mount (in a container: list it in cluster.mounts)"
    return HarnessError(f"the run's folder is not shared: {reason}", where=str(run_dir), fix=fix)


def read_dataset(path: str) -> Facts:
    """Return the fingerprint of a dataset after reading its first and last pack, or the sizes of a .bin/.idx pair."""
    if with_suffix(Path(path), IDX).is_file():
        index = MappedIndex(with_suffix(Path(path), IDX))
        return {"sequences": index.header.num_sequences, "bytes": with_suffix(Path(path), BIN).stat().st_size}
    data = open_datasets(DataConfig(path=path))
    data.train.read([0, len(data.train) - 1])
    return {"fingerprint": data.train.fingerprint, "packs": len(data.train)}


def read_weights(folder: Path) -> Facts:
    """Return the number and the total size of the files in a model's folder."""
    fix = "mount it on every node (in a container: list it in cluster.mounts)"
    with os_errors_as(HarnessError, "cannot be read", where=folder, fix=fix):
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def copy_checks(paths: list[str], local_dir: Path, *, timeout_s: float) -> dict[str, Check]:
    """Return checks for `run_checks` that copy each path to this node, and fail if no byte arrives for `timeout_s`."""
    return {COPY_OF + path: partial(_copy, path, local_dir, timeout_s) for path in paths}


def _copy(path: str, local_dir: Path, timeout_s: float) -> Facts:
    began = last = time.monotonic()
    copied: Future[LocalCopy] = Future()

    def progress(num_bytes: int) -> None:
        nonlocal last
        last = time.monotonic()

    def work() -> None:
        try:
            copied.set_result(copy_to_node(path, local_dir, known=known_hashes(path), progress=progress))
        except Exception as error:
            copied.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not copied.done() and time.monotonic() - last < timeout_s:
        wait([copied], 0.2)
    if not copied.done():
        fix = "the file system or the disk of the node hangs; or another job copies the same there"
        raise HarnessError(f"no data arrived for {timeout_s:g} s", where=path, fix=fix)
    made = copied.result()
    facts = {"files": len(made.files), "bytes": made.num_bytes, "xxh3": made.digest}
    return {**facts, "took_s": time.monotonic() - began, "new_bytes_s": made.new_bytes}


def known_hashes(path: str) -> dict[str, str]:
    """Return the recorded hashes of the files of a dataset or of weights; files without a recorded hash are omitted."""
    if not Path(path).is_dir():
        return {}
    if (listed := read_checksums(Path(path))) is not None:
        return {file.path: file.xxh3 for file in listed}
    hashes: dict[str, str] = {}
    with suppress(FormatError, OSError):  # weights, or files of another tool
        data = open_datasets(DataConfig(path=path))
        for reader in (*data.sources, data.validation):
            if isinstance(reader, PackReader) and reader.manifest is not None:
                below = Path(reader.path).relative_to(path)
                files = [*reader.manifest.index, *(file for shard in reader.manifest.shards for file in shard.files)]
                hashes |= {str(below / file.path): file.xxh3 for file in files}
    return hashes


def check_rendezvous(address: str, port: int, place: NodePlace, *, timeout_s: float) -> Facts:
    """Connect to the first node, which listens; `offset_s` is the lead of this node's clock over the first node's."""
    if place.number > 0:
        return _connect(address, port, place, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    is_dual = socket.has_dualstack_ipv6()
    fix = "submit again: another process has taken the port since the job began"
    with os_errors_as(HarnessError, f"rank 0 cannot listen on port {port}", where=socket.gethostname(), fix=fix):
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    with server:
        server_thread = threading.Thread(target=_serve, args=(server, place, deadline), daemon=True)
        server_thread.start()
        facts = _connect(address, port, place, timeout_s=timeout_s / 2)
        server_thread.join()
    return facts


def check_own_name(num_nodes: int) -> Facts:
    """Raise HarnessError if other nodes cannot reach the address of this node's own name, which gloo gives to them."""
    if num_nodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    if all(_is_loopback(address) for address in addresses):
        state = f"is {', '.join(sorted(addresses))}" if addresses else "has no address"
        what = f"the node's own name {own} {state}, which gloo would give to the other nodes"
        fix = "set cluster.env.GLOO_SOCKET_IFNAME=INTERFACE, or correct /etc/hosts of the node"
        raise HarnessError(what, where="/etc/hosts", fix=fix)
    return {}


def _serve(server: socket.socket, place: NodePlace, deadline: float) -> None:
    server.settimeout(0.2)
    connected: set[str] = set()
    while len(connected) < place.num_nodes and time.monotonic() < deadline:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            try:
                connection.settimeout(_ONE_EXCHANGE_S)
                request = json.loads(connection.makefile().readline())
                if request["attempt"] == place.attempt:
                    connection.sendall(json.dumps({"now": time.time()}).encode() + b"\n")
                    # The client closes the connection first, so that the port is free at once.
                    connection.recv(1)
                    connected.add(request["node"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue


def _connect(address: str, port: int, place: NodePlace, *, timeout_s: float) -> Facts:
    where = f"MASTER_ADDR {address or 'is not set'}, port {port}"
    fix = "set cluster.master_addr=%NSUFFIX, the name by which other nodes reach the first one"
    try:
        resolved = str(socket.getaddrinfo(address or "\0", port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HarnessError(f"MASTER_ADDR {address!r} does not resolve: {reason}", where=where, fix=fix) from None
    # Only names that are loopback on every node: a node's own name may be loopback on that node (Debian's 127.0.1.1).
    if place.num_nodes > 1 and (address.partition(".")[0] == "localhost" or _is_loopback(address)):
        raise HarnessError(f"MASTER_ADDR {address} is each node's loopback, not the first node", where=where, fix=fix)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return {"offset_s": _exchange(resolved, port, {"attempt": place.attempt, "node": place.node})}
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if time.monotonic() > deadline:
            what = f"the first node does not answer at MASTER_ADDR {address} ({resolved}), port {port}: {reason}"
            fix += "; or open ports 20000 to 31999 between the nodes, if a firewall closes them"
            raise HarnessError(what, where=where, fix=fix)
        time.sleep(0.2)


def _exchange(address: str, port: int, request: dict[str, str]) -> float:
    """Return the seconds that this clock is ahead of the first node's, accurate to half the exchange's duration."""
    with socket.create_connection((address, port), timeout=_ONE_EXCHANGE_S) as connection:
        before = time.time()
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(connection.makefile().readline() or "null")
        after = time.time()
    if not isinstance(answer, dict) or not isinstance(answer.get("now"), float):
        raise ValueError("the process that answers is not a node of this job")
    return float((before + after) / 2 - answer["now"])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
