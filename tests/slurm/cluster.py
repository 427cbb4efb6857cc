"""Start a real Slurm cluster on one machine: a login node with slurmctld, and nodes with one slurmd each.

Every node has its own network, host name and mount namespaces: its own address, loopback, host name and /dev/shm, and
files that no other node has if a test mounts some. Nothing listens outside of these namespaces. Needs root and the
Debian packages slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter", "setpriv")
_NET = "10.79.0"


def missing() -> list[str]:
    names = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return names if os.geteuid() == 0 else [*names, "root"]


class Cluster:
    """A cluster of nodes `node1`, `node2`, ... in two partitions; jobs of `urgent` preempt jobs of `batch`.

    Attributes:
        root: folder of its configuration, logs and state.
        nodes: names of the nodes.
    """

    def __init__(self, num_nodes: int = 2, *, credential_s: int = 5) -> None:
        """Take the seconds until a requeued job may start; 120 by default in Slurm."""
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self.root = Path(tempfile.mkdtemp(prefix="harness-slurm-"))
        self._credential_s = credential_s
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PMI"))},
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def start(self) -> None:
        self.root.chmod(0o755)
        for name in ("state", "log"):
            (self.root / name).mkdir()
        self._write_settings()
        for name in ("login", *self.nodes):
            self._hold(name)
        self._connect()
        self._start_munge()
        self.start_controller("-c")
        for node in self.nodes:
            self.start_slurmd(node)
        self.wait_idle()

    def stop(self) -> None:
        if "slurmctld" in self._daemons:
            self.on("login", "scancel", "--full", "--signal=KILL", "--user=root")
            self.on("login", "scancel", "--user=root")
            deadline = time.monotonic() + 30
            while self.on("login", "squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for name in sorted(self._daemons):  # munged, slurmctld, then the daemons of the nodes
            self.end_daemon(name)
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def command(self, node: str, *words: str | Path) -> list[str]:
        """Return the command line that runs `words` on a node, or on `login`."""
        inside = ["nsenter", f"--target={self._holders[node].pid}", "--net", "--uts", "--mount", f"--wd={Path.cwd()}"]
        return [*inside, "--", *map(str, words)]

    def on(self, node: str, *words: str | Path, check: bool = False, cwd: Path | None = None) -> str:
        done = subprocess.run(
            self.command(node, *(["env", "-C", cwd] if cwd else []), *words),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def start_controller(self, *options: str) -> None:
        """Start slurmctld with the state that it left; `-c` forgets it."""
        self._daemon("slurmctld", "login", "slurmctld", "-D", *options)
        # A registration is lost if the controller does not answer yet, and is repeated only after seconds.
        wait_for(lambda: "is UP" in self.on("login", "scontrol", "ping"), "slurmctld", timeout_s=120)

    def start_slurmd(self, node: str) -> None:
        self._daemon(f"slurmd-{node}", node, "slurmd", "-D", "-N", node)

    def end_daemon(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(how)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def kill_node(self, node: str) -> None:
        """Simulate a power failure: kill slurmd and every process of the node at once."""
        self.end_daemon(f"slurmd-{node}", signal.SIGKILL)
        for pid in self.processes(node):
            os.kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        holder = self._holders[node].pid
        inside = Path(f"/proc/{holder}/ns/net").stat().st_ino
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "ns/net").stat().st_ino == inside:
                    pids.append(int(process.name))
            except OSError:  # just ended
                continue
        return [pid for pid in pids if pid != holder]

    def rank_on(self, node: str) -> int:
        """Return the process that trains on a node, not one that it has forked and that still has its arguments."""
        parents = {}
        for pid in self.processes(node):
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # just ended
                continue
            if (
                "python" in arguments[0]
                and "harness.recipes.sft" in arguments
                and "torch.distributed.run" not in arguments
            ):
                parents[pid] = parent
        (rank,) = [pid for pid, parent in parents.items() if parent not in parents]
        return rank

    def wait_idle(self) -> None:
        def all_idle() -> bool:
            idle = self.on("login", "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t").split("\n")
            return sorted(line.strip() for line in idle if line.strip()) == [f"{node} idle" for node in self.nodes]

        wait_for(all_idle, "idle nodes", timeout_s=240)

    def _write_settings(self) -> None:
        hosts = ["127.0.0.1 localhost", f"{_NET}.1 login"]
        hosts += [f"{_NET}.{10 + number} {node}" for number, node in enumerate(self.nodes, start=1)]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        count, root = len(self.nodes), self.root
        (self.root / "slurm.conf").write_text(
            f"""
ClusterName=harness
SlurmctldHost=login({_NET}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts only after its credential has expired.
AuthInfo=socket={root}/munge/socket,cred_expire={self._credential_s}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A preempted job gets its --signal first.
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
# Seconds until a silent node counts as down; 300 by default.
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
PropagateResourceLimits=NONE
NodeName=node[1-{count}] NodeAddr={_NET}.[11-{10 + count}] CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 \
ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
        )

    def _hold(self, name: str) -> None:
        """Create the namespaces of a node, and a process that holds them."""
        ready = self.root / f"{name}.ready"
        script = (
            f"hostname {name} && ip link set lo up && mount --bind {self.root}/hosts /etc/hosts && "
            f"mount -t tmpfs -o mode=1777 tmpfs /dev/shm && touch {ready} && exec sleep infinity"
        )
        self._holders[name] = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", script],
            env=self._environment,
        )
        wait_for(ready.exists, f"the namespaces of {name}", timeout_s=60)

    def _connect(self) -> None:
        login = self._holders["login"].pid
        self.on("login", "ip", "link", "add", "br0", "type", "bridge", check=True)
        self.on("login", "ip", "address", "add", f"{_NET}.1/24", "dev", "br0", check=True)
        self.on("login", "ip", "link", "set", "br0", "up", check=True)
        for number, node in enumerate(self.nodes, start=1):
            pair = ["type", "veth", "peer", "name", f"to-{node}", "netns", str(login)]
            self.on(node, "ip", "link", "add", "eth0", *pair, check=True)
            self.on(node, "ip", "address", "add", f"{_NET}.{10 + number}/24", "dev", "eth0", check=True)
            self.on(node, "ip", "link", "set", "eth0", "up", check=True)
            self.on("login", "ip", "link", "set", f"to-{node}", "master", "br0", "up", check=True)

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        folder.mkdir(mode=0o711)
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(1024))
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        self._daemon("munged", "login", *user, "munged", "--foreground", f"--socket={folder}/socket", *files)
        wait_for((folder / "socket").exists, "munged", timeout_s=60)

    def _daemon(self, name: str, node: str, *words: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self.command(node, *words), env=self._environment, stdout=log, stderr=log, start_new_session=True
            )


def wait_for(happens: Callable[[], bool], event: str, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"no {event} within {timeout_s:g} s"
        time.sleep(0.1)
