"""A real S3 server on loopback for tests: Ceph's RADOS gateway over one monitor and one store in memory.

Takes the Debian packages radosgw, ceph-mon and ceph-osd; needs no root and no fixed port. It checks signatures, ranges
and multipart uploads as a cluster does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path

PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-that-nobody-may-see"
_START_S = 240.0

# One of everything, no replicas, and no waiting for peers that will never come.
_CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port},v1:127.0.0.1:{old_port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon cluster log file = {root}/cluster.log
keyring = {root}/keyring
run dir = {root}
admin socket = {root}/$name.asok
log file = {root}/$name.log
log to stderr = false
err to stderr = false
pid file =
mon data = {root}/mon
osd data = {root}/osd
rgw data = {root}/rgw
osd objectstore = memstore
memstore device bytes = 1073741824
paxos propose interval = 0.05
paxos min wait = 0.01
mon osdmap full prune enabled = false
auth allow insecure global id reclaim = false
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd max object name len = 256
ms bind ipv6 = false

[client.rgw.test]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
"""


def missing_programs() -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Gateway:
    """The three daemons, in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._env = {**os.environ, "CEPH_CONF": str(root / "ceph.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0

    def start(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._root / name).mkdir(parents=True)
        self.port, mon_port, old_port = _free_port(), _free_port(), _free_port()
        fsid = str(uuid.uuid4())
        conf = _CONF.format(fsid=fsid, root=self._root, port=self.port, mon_port=mon_port, old_port=old_port)
        (self._root / "ceph.conf").write_text(conf)
        keyring, monmap = str(self._root / "keyring"), str(self._root / "monmap")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name, *caps in (
            ("client.admin", "mon", "allow *", "osd", "allow *", "mgr", "allow *"),
            ("osd.0", "mon", "allow profile osd", "osd", "allow *"),
            ("client.rgw.test", "mon", "allow rw", "osd", "allow rwx"),
        ):
            pairs = [word for i in range(0, len(caps), 2) for word in ("--cap", caps[i], caps[i + 1])]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *pairs)
        addresses = f"[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{old_port}]"
        self._run("monmaptool", "--create", "--addv", "a", addresses, "--fsid", fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._daemon("mon", "ceph-mon", "-f", "-i", "a")
        self._wait("the monitor", lambda: self._answers("ceph", "-s"))
        store = str(uuid.uuid4())
        self._run("ceph", "osd", "new", store)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", store)
        self._daemon("osd", "ceph-osd", "-f", "-i", "0")
        self._wait("the store", lambda: "1 up" in self._answers("ceph", "osd", "stat"))
        self.start_gateway()
        keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)

    def start_gateway(self) -> None:
        """Start the HTTP server; what is stored outlives it."""
        self._daemon("rgw", "radosgw", "-f", "-n", "client.rgw.test")
        self._wait("the gateway", lambda: _listens(self.port))

    def kill_gateway(self) -> None:
        """End the HTTP server as a crash does."""
        daemon = self._daemons.pop("rgw")
        daemon.kill()
        daemon.wait()

    def stop(self) -> None:
        for name in ("rgw", "osd", "mon"):
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.kill()
                daemon.wait()

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False, timeout=_START_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        return done.stdout

    def _answers(self, *command: str) -> str:
        try:
            done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False, timeout=30)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def _daemon(self, name: str, *command: str) -> None:
        with (self._root / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(command, env=self._env, stdout=out, stderr=out)

    def _wait(self, what: str, is_there: object) -> None:
        assert callable(is_there)
        end = time.monotonic() + _START_S
        while not is_there():
            if time.monotonic() > end:
                raise RuntimeError(f"{what} did not start within {_START_S:.0f} s; see {self._root}")
            time.sleep(0.05)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
