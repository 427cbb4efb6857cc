"""What the nodes said, held together: which node is wrong, in which way, and what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A GPU that nobody uses holds some hundred MiB of its driver's.
_UNUSED_GPU_MIB = 2048
# The first entry of `versions` that differs is told; the others follow from it more often than not.
_SAME_EVERYWHERE = {
    "versions": "install the same environment on every node, or name one on a shared file system: cluster.python",
    "gpus": "drain the node, or leave it out: cluster.exclude",
    "all-reduce": "install the same environment on every node, or name one on a shared file system: cluster.python",
}


@dataclass(frozen=True)
class Limits:
    """What is asked of every node: `harness.launch.cluster.PreflightConfig`, and its GPUs."""

    gpus: int = 0
    min_shm_mib: int = 0
    min_disk_gib: float = 0.0
    max_clock_offset_s: float = float("inf")
    code: str = ""


@dataclass(frozen=True)
class Finding:
    """What is wrong with one node, and how to mend it."""

    node: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.node}: {self.what}" + (f"\n  fix:   {self.fix}" if self.fix else "")


@dataclass
class _Said:
    """What one node said, by check; of several ranks of a node the last one's facts, and every error."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[tuple[bool, Finding]] = field(default_factory=list)


def judge_nodes(lines: Iterable[str], nodes: Sequence[str], limits: Limits) -> tuple[list[Finding], str]:
    """What is wrong, the causes before what they may have caused; and in a line what is right.

    Args:
        lines: of JSON, as `run_checks` prints them; others, of whatever else writes there, are left out.
        nodes: of the job, the first one first.
    """
    said = _read(lines)
    silent = [Finding(node, *_silent(node)) for node in nodes if node not in said]
    errors = [error for node in nodes if node in said for error in said[node].errors]
    causes = [finding for late, finding in errors if not late]
    present = [node for node in nodes if node in said]
    causes += [found for node in present for found in _below_limits(node, said[node].facts, limits)]
    causes += _differences(present, said)
    late = [finding for is_late, finding in errors if is_late]
    return [*silent, *causes, *late], _summary(present, said)


def _silent(node: str) -> tuple[str, str]:
    return (
        "the node has said nothing",
        f"its own log tells whether the step began there (slurmd.log, `scontrol show node {node}`); leave it out with "
        f"cluster.exclude={node}. Where an image is unpacked, raise cluster.preflight.timeout_s",
    )


def _read(lines: Iterable[str]) -> dict[str, _Said]:
    said: dict[str, _Said] = {}
    for line in lines:
        try:
            told = json.loads(line)
            node, check = told["node"], told["check"]
        except (ValueError, TypeError, KeyError):
            continue
        found = said.setdefault(node, _Said())
        if "facts" in told:
            found.facts[check] = told["facts"]
            continue
        where = f" ({told['where']})" if told.get("where") else ""
        prefix = f"rank {told['rank']}, " if "rank" in told else ""
        finding = Finding(node, f"{prefix}{check}: {told['error']}{where}", told.get("fix", ""))
        if finding not in [one for _, one in found.errors]:
            found.errors.append((bool(told.get("late")), finding))
    return said


def _below_limits(node: str, facts: dict[str, dict[str, Any]], limits: Limits) -> Iterable[Finding]:
    gpus = facts.get("gpus", {}).get("gpus", [])
    if "gpus" in facts and len(gpus) < limits.gpus:
        yield Finding(
            node,
            f"gpus: nvidia-smi shows {len(gpus)}, and the job asks for {limits.gpus}",
            f"cluster.gpus_per_node={len(gpus)}, or drain the node: a GPU has fallen off the bus",
        )
    # A node that is the job's alone; on a shared one the other GPUs are somebody else's.
    if limits.gpus and len(gpus) == limits.gpus:
        for number, gpu in enumerate(gpus):
            if gpu["used_mib"] > _UNUSED_GPU_MIB:
                yield Finding(
                    node,
                    f"gpus: {gpu['used_mib']:,} MiB of GPU {number} are taken before the job has begun",
                    "a process of an earlier job is left there: end it, or drain the node",
                )
    if facts.get("shm", {}).get("mib", limits.min_shm_mib) < limits.min_shm_mib:
        yield Finding(
            node,
            f"shm: /dev/shm has {facts['shm']['mib']:,} MiB, loader workers need {limits.min_shm_mib:,}",
            "mount it larger (a container engine's --shm-size; the node's /etc/fstab), or loader.num_workers=0 and "
            "cluster.preflight.min_shm_mib=0",
        )
    if facts.get("disk", {}).get("gib", limits.min_disk_gib) < limits.min_disk_gib:
        yield Finding(
            node,
            f"disk: {facts['disk']['gib']:.1f} GiB are free where the run's folder is, of {limits.min_disk_gib:g}",
            "make room, name another folder with runs=, or lower cluster.preflight.min_disk_gib",
        )
    if limits.code and facts.get("versions", {}).get("code", limits.code) != limits.code:
        yield Finding(
            node,
            f"versions: the container's code or configs are not those that submitted the job (code {limits.code})",
            "build the image again (docker/build.sh), mount the checkout over it (cluster.mounts, "
            "DIR:/opt/harness), or take the image's own: cluster.preflight.same_code=false",
        )
    offset_s = facts.get("first node", {}).get("offset_s", 0.0)
    if abs(offset_s) > limits.max_clock_offset_s:
        ahead = "ahead of" if offset_s > 0 else "behind"
        yield Finding(
            node,
            f"clock: {abs(offset_s):.1f} s {ahead} the first node's",
            "start chronyd or ntpd on it: logs, file times and Kerberos tickets go by the clock",
        )


def _differences(nodes: Sequence[str], said: dict[str, _Said]) -> Iterable[Finding]:
    """Facts that have to be the same on every node: those of most nodes, of the first one where they are even."""
    for check in dict.fromkeys(name for node in nodes for name in said[node].facts):
        if check not in _SAME_EVERYWHERE and not check.startswith(("dataset ", "weights ", "live chunks ")):
            continue
        facts = {node: _comparable(said[node].facts[check]) for node in nodes if check in said[node].facts}
        for key in dict.fromkeys(key for one in facts.values() for key in one):
            values = {node: one.get(key) for node, one in facts.items()}
            expected, _ = Counter(values.values()).most_common(1)[0]
            reference = next(node for node, value in values.items() if value == expected)
            for node, value in values.items():
                if value != expected:
                    yield Finding(
                        node,
                        f"{check}: {key} is {value}, on {reference} it is {expected}",
                        _SAME_EVERYWHERE.get(check, "copy it there again, or name one path that all share"),
                    )


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    if "gpus" in facts:
        kinds = sorted(gpu["name"] for gpu in facts["gpus"])
        return {"number of GPUs": len(kinds), "kind of GPU": ", ".join(dict.fromkeys(kinds)), "driver": facts["driver"]}
    return {key: value for key, value in facts.items() if not key.endswith("_s")}


def _summary(nodes: Sequence[str], said: dict[str, _Said]) -> str:
    facts = said[nodes[0]].facts if nodes else {}
    words = [f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"]
    if "versions" in facts:
        versions = facts["versions"]
        words += [f"{len(facts.get('gpus', {}).get('gpus', []))} GPUs each"]
        words += [f"{name} {versions[name]}" for name in ("python", "torch", "megatron-core")]
        offsets = [abs(one.facts.get("first node", {}).get("offset_s", 0.0)) for one in said.values()]
        words += [f"clocks within {max(offsets) * 1e3:.1f} ms"]
    if "all-reduce" in facts:
        reduced = facts["all-reduce"]
        words += [f"all-reduce by {reduced['backend']} over {reduced['ranks']} ranks in {reduced['seconds_s']:.1f} s"]
        words += [f"{reduced['rate_s']:.1f} GB/s"]
    return ", ".join(words)
