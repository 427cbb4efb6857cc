"""Propose a cluster file from the partitions that Slurm reports."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError
from harness.launch.queue import ask_slurm

# Name, time limit, nodes, cores, memory in MB, GPUs and features of each kind of node of each partition.
_FORMAT = "%R|%l|%D|%c|%m|%G|%f"
# A GPU type contains a letter, such as `1g.10gb` for a part of a GPU; a number alone is the count.
_GPUS = re.compile(r"gpu:(?:([\w.-]*[A-Za-z][\w.-]*):)?(\d+)")
_WITHOUT_LIMIT = "24:00:00"
# Manufacturers in the firmware of a cloud's virtual machines and servers, each with the file of `configs/cluster` for
# that cloud's fabric.
_SITES = {
    "amazon ec2": "aws_p5",
    "google": "gcp_a3ultra",
    "microsoft corporation": "azure_ndv5",
    "oraclecloud.com": "oci_h100",
}
_FIRMWARE = Path("/sys/class/dmi/id")
# Node features with which sites name their fabric.
_ROCE = re.compile(r"(^|[,_-])(roce|spectrum)", re.IGNORECASE)
# Google's blueprints name partitions and features after the machine type.
_GOOGLE = (("gcp_a3mega", re.compile(r"a3-?mega")), ("gcp_a3high", re.compile(r"a3-?high|\ba3\b")))
_GB200 = re.compile(r"gb[23]00", re.IGNORECASE)
# Memory in GiB of GPU types that have only one memory size.
_GPU_GIB = {"h100": 80, "h200": 140, "b200": 179, "gb200": 185}


@dataclass(frozen=True)
class Partition:
    """Nodes of one kind in a partition; cores and memory are per node, and only memory available to jobs counts."""

    name: str
    time_limit: str
    nodes: int
    cores: int
    memory_mb: int
    gpus: int
    gpu: str
    features: str


def read_partitions(text: str) -> list[Partition]:
    """Return the partitions in the output of sinfo."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != _FORMAT.count("|") + 1:
            continue
        name, limit, nodes, cores, memory, gres, features = fields
        gpus = _GPUS.findall(gres)
        limit = _WITHOUT_LIMIT if limit in ("infinite", "n/a") else limit
        num_nodes, num_cores, memory_mb = (int(re.sub(r"\D.*", "", text) or 0) for text in (nodes, cores, memory))
        kind = next((name for name, _ in gpus if name), "")
        num_gpus = sum(int(count) for _, count in gpus)
        found.append(Partition(name, limit, num_nodes, num_cores, memory_mb, num_gpus, kind, features))
    return found


def detect_cluster(partition: str = "") -> str:
    """Return the text of a cluster file for the nodes of a partition, by default of the largest GPU partition.

    Raises HarnessError if sinfo is not installed or fails, and ConfigError for a partition that does not exist.
    """
    printed = ask_slurm("sinfo", "--noheader", "--noconvert", f"--format={_FORMAT}")
    return propose_cluster(read_partitions(printed), partition, site=find_site())


def find_site(firmware: Path = _FIRMWARE) -> str:
    """Return the name of the cluster file of the cloud that this machine runs in; empty for other machines."""
    for name in ("sys_vendor", "chassis_asset_tag"):
        with suppress(OSError, UnicodeDecodeError):
            site = _SITES.get((firmware / name).read_text().strip().lower())
            if site is not None:
                return site
    return ""


_UNKNOWN_FABRIC = """\
cpu_bind: cores
exclusive: true
memory: "0"
env:
  TORCH_NCCL_HIGH_PRIORITY: "1"
  NCCL_NVLS_ENABLE: "0"
  NVTE_FWD_LAYERNORM_SM_MARGIN: "16"
  NVTE_BWD_LAYERNORM_SM_MARGIN: "16"
  TORCH_NCCL_ASYNC_ERROR_HANDLING: "1"
  # A login node does not show the fabric. On a node, `ibdev2netdev` lists the rails, `ip -br addr` the
  # interface of node names. For InfiniBand or RoCE: `defaults: [h100_ib, _self_]` or `[roce, _self_]`.
  # NCCL_IB_HCA: "=mlx5_0,mlx5_1"
  # NCCL_SOCKET_IFNAME: eth0
preflight:
  min_shm_mib: 32768
  # Measure a healthy job (`harness logs RUN` has the figures), and set about two thirds of them.
  # min_node_gb_s: 200
  # min_pair_gb_s: 80
  # min_all_gb_s: 60
"""


def propose_cluster(partitions: list[Partition], name: str = "", *, site: str = "") -> str:
    """Return the text of a cluster file for the nodes of a partition; see `detect_cluster` and `find_site`."""
    chosen = [each for each in partitions if name in ("", each.name)]
    names = dict.fromkeys(each.name for each in partitions)
    if not chosen:
        what = f"there is no partition {name!r}" if name else "Slurm reports no partition"
        fix = f"one of {', '.join(names)}" if names else "ask the administrators"
        raise ConfigError(what, where="sinfo", fix=fix)
    nodes = max(chosen, key=lambda each: (each.gpus > 0, each.gpus * each.nodes, each.nodes))
    others = [other for other in names if other != nodes.name]
    ranks = nodes.gpus or max(1, min(2, nodes.cores))
    site = _site_of(nodes, site)
    lines = [
        f"# Proposed from sinfo for the partition {nodes.name}: {nodes.nodes} nodes of {nodes.cores} cores, "
        f"{nodes.memory_mb / 1024:,.0f} GiB"
        + (f", {nodes.gpus} GPUs ({nodes.gpu or 'of unknown kind'})" * (nodes.gpus > 0)),
        *([f"# Their features: {nodes.features}"] if nodes.features not in ("", "(null)") else []),
        f"# Other partitions: {', '.join(others) or 'none'}",
        *(
            ["# The fabric is that of this file: compare it with a node.", "defaults:", f"  - {site}", "  - _self_"]
            * (site != "")
        ),
        f'partition: "{nodes.name}"',
        f'time: "{nodes.time_limit}"',
        f"gpus_per_node: {nodes.gpus}",
        *([f"gpu_gib: {_GPU_GIB.get(nodes.gpu.lower(), 'null')}"] if nodes.gpus else []),
        f"ranks_per_node: {ranks}",
        f"cpus_per_rank: {max(1, nodes.cores // ranks)}",
    ]
    rest = "" if site else _UNKNOWN_FABRIC if nodes.gpus else 'env:\n  OMP_NUM_THREADS: "1"\n'
    return "\n".join(lines) + "\n" + rest


def _site_of(nodes: Partition, site: str) -> str:
    """Return the name of the cluster file with the fabric of these nodes; empty if none is known."""
    if not nodes.gpus:
        return ""
    if _GB200.search(f"{nodes.gpu},{nodes.features}"):
        return "gb200"
    if site == "gcp_a3ultra":
        return next((name for name, kind in _GOOGLE if kind.search(f"{nodes.name},{nodes.features}")), site)
    return "roce" if not site and _ROCE.search(nodes.features) else site
