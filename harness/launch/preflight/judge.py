"""Compare the answers of all nodes: which node is faulty, in which way, and how to fix it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# The driver holds some hundred MiB of an unused GPU.
_UNUSED_GPU_MIB = 2048
_SAME_ENVIRONMENT = "install the same environment on every node, or set cluster.python to one on a shared file system"
# Checks whose facts must be equal on every node, and the fix where they are not.
_SAME_EVERYWHERE = {
    "versions": _SAME_ENVIRONMENT,
    "gpus": "drain the node, or leave it out: cluster.exclude",
    "all-reduce": _SAME_ENVIRONMENT,
}


@dataclass(frozen=True)
class Limits:
    """Requirements on every node: those of `PreflightConfig`, its GPUs and its code."""

    gpus: int = 0
    min_shm_mib: int = 0
    min_disk_gib: float = 0.0
    max_clock_offset_s: float = float("inf")
    code: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault of one node."""

    node: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.node}: {self.what}" + (f"\n  fix:   {self.fix}" if self.fix else "")


@dataclass
class _Answers:
    """Answers of one node: facts by check, those of the last rank where several answer, and the errors of all."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[Fault] = field(default_factory=list)
    timeouts: list[Fault] = field(default_factory=list)


def judge_nodes(lines: Iterable[str], nodes: Sequence[str], limits: Limits) -> tuple[list[Fault], str]:
    """Return the faults, causes before the timeouts that they may have caused, and a line about the healthy nodes.

    Args:
        lines: the JSON lines of `run_checks`; other lines, of whatever else writes there, are skipped.
        nodes: the nodes of the job, the first one first.
        limits: the requirements on every node.
    """
    answers = _read(lines)
    present = [node for node in nodes if node in answers]
    fix = (
        "look in its own log (slurmd.log, `scontrol show node {0}`) whether the step began there; leave it out "
        "with cluster.exclude={0}. If an image is unpacked first, raise cluster.preflight.timeout_s"
    )
    faults = [Fault(node, "no answer from the node", fix.format(node)) for node in nodes if node not in answers]
    faults += [fault for node in present for fault in answers[node].errors]
    faults += [Fault(node, *fault) for node in present for fault in _below_limits(answers[node].facts, limits)]
    faults += _differences({node: answers[node].facts for node in present})
    faults += [fault for node in present for fault in answers[node].timeouts]
    return faults, _summary([answers[node].facts for node in present])


def _read(lines: Iterable[str]) -> dict[str, _Answers]:
    answers: dict[str, _Answers] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            node, check = entry["node"], entry["check"]
        except (ValueError, TypeError, KeyError):
            continue
        of_node = answers.setdefault(node, _Answers())
        if "facts" in entry:
            of_node.facts[check] = entry["facts"]
            continue
        where = f" ({entry['where']})" if entry.get("where") else ""
        rank = f"rank {entry['rank']}, " if "rank" in entry else ""
        fault = Fault(node, f"{rank}{check}: {entry['error']}{where}", entry.get("fix", ""))
        faults = of_node.timeouts if entry.get("late") else of_node.errors
        if fault not in faults:
            faults.append(fault)
    return answers


def _below_limits(facts: dict[str, dict[str, Any]], limits: Limits) -> Iterable[tuple[str, str]]:
    """Yield each fault and its fix."""
    gpus = facts.get("gpus", {}).get("gpus", [])
    if "gpus" in facts and len(gpus) < limits.gpus:
        yield (
            f"gpus: nvidia-smi shows {len(gpus)}, the job asks for {limits.gpus}",
            f"set cluster.gpus_per_node={len(gpus)}, or drain the node: a GPU has fallen off the bus",
        )
    # Only on a node that the job has to itself; on a shared node the other GPUs belong to other jobs.
    if limits.gpus and len(gpus) == limits.gpus:
        for number, gpu in enumerate(gpus):
            if gpu["used_mib"] > _UNUSED_GPU_MIB:
                yield (
                    f"gpus: {gpu['used_mib']:,} MiB of GPU {number} are in use before the job has begun",
                    "end the process that an earlier job left there, or drain the node",
                )
    if facts.get("shm", {}).get("mib", limits.min_shm_mib) < limits.min_shm_mib:
        yield (
            f"shm: /dev/shm has {facts['shm']['mib']:,} MiB, loader workers need {limits.min_shm_mib:,}",
            "make it larger (--shm-size of a container engine; /etc/fstab of the node), or set loader.num_workers=0 "
            "and cluster.preflight.min_shm_mib=0",
        )
    if facts.get("disk", {}).get("gib", limits.min_disk_gib) < limits.min_disk_gib:
        yield (
            f"disk: {facts['disk']['gib']:.1f} GiB are free for the run's folder, {limits.min_disk_gib:g} are required",
            "free space, set runs= to another folder, or lower cluster.preflight.min_disk_gib",
        )
    if limits.code and facts.get("versions", {}).get("code", limits.code) != limits.code:
        yield (
            f"versions: the code or configs of the container differ from those that submitted the job ({limits.code})",
            "build the image again (docker/build.sh), mount the checkout over it (cluster.mounts, "
            "DIR:/opt/harness), or run the image's own code: cluster.preflight.same_code=false",
        )
    offset_s = facts.get("first node", {}).get("offset_s", 0.0)
    if abs(offset_s) > limits.max_clock_offset_s:
        yield (
            f"clock: {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} that of the first node",
            "start chronyd or ntpd on it: logs, file times and Kerberos tickets depend on the clock",
        )


def _differences(facts: dict[str, dict[str, dict[str, Any]]]) -> Iterable[Fault]:
    """Yield the nodes whose facts differ from those of most nodes, or of the first node where there is a tie."""
    for check in dict.fromkeys(check for of_node in facts.values() for check in of_node):
        if check not in _SAME_EVERYWHERE and not check.startswith(("dataset ", "weights ", "live chunks ")):
            continue
        compared = {node: _comparable(of_node[check]) for node, of_node in facts.items() if check in of_node}
        for key in dict.fromkeys(key for values in compared.values() for key in values):
            values = {node: of_node.get(key) for node, of_node in compared.items()}
            expected, _ = Counter(values.values()).most_common(1)[0]
            reference = next(node for node, value in values.items() if value == expected)
            for node, value in values.items():
                if value != expected:
                    yield Fault(
                        node,
                        f"{check}: {key} is {value}, on {reference} it is {expected}",
                        _SAME_EVERYWHERE.get(check, "copy it there again, or name one path that all nodes share"),
                    )


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a check that must be equal on all nodes; names that end in `_s` are measurements."""
    if "gpus" in facts:
        kinds = sorted(gpu["name"] for gpu in facts["gpus"])
        return {"number of GPUs": len(kinds), "kind of GPU": ", ".join(dict.fromkeys(kinds)), "driver": facts["driver"]}
    return {key: value for key, value in facts.items() if not key.endswith("_s")}


def _summary(nodes: Sequence[dict[str, dict[str, Any]]]) -> str:
    facts = nodes[0] if nodes else {}
    parts = [f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"]
    if "versions" in facts:
        versions = facts["versions"]
        parts += [f"{len(facts.get('gpus', {}).get('gpus', []))} GPUs each"]
        parts += [f"{name} {versions[name]}" for name in ("python", "torch", "megatron-core")]
        offsets_s = [abs(of_node.get("first node", {}).get("offset_s", 0.0)) for of_node in nodes]
        parts += [f"clocks within {max(offsets_s) * 1e3:.1f} ms"]
    if "all-reduce" in facts:
        reduced = facts["all-reduce"]
        parts += [f"all-reduce by {reduced['backend']} over {reduced['ranks']} ranks in {reduced['seconds_s']:.1f} s"]
        parts += [f"{reduced['rate_s']:.1f} GB/s"]
    return ", ".join(parts)
