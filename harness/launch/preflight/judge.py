"""Compare the answers of all nodes, and report each faulty node with its fault and a fix."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.launch.cluster import PreflightConfig

# The driver uses a few hundred MiB of an unused GPU.
_UNUSED_GPU_MIB = 2048
_SAME_ENVIRONMENT = "install the same environment on every node, or set cluster.python to one on a shared file system"
# Checks whose facts must be equal on every node, and the fix if they are not.
_SAME_EVERYWHERE = {
    "versions": _SAME_ENVIRONMENT,
    "gpus": "drain the node, or exclude it with cluster.exclude",
    "all-reduce": _SAME_ENVIRONMENT,
    "infiniband": "drain the node: a cable, an adapter or a switch port has failed",
}
COPY_OF = "copy of "
# Faults that are not about the node itself: the address or port of the first node, and effects of another node.
_NOT_ITS_OWN = ("first node", "own name", "live chunks", "all-reduce", "rank ")
# A rank or link below this fraction of the median of all is faulty, even above a limit; a limit of 0 disables both.
_LEAST_SHARE = 0.7
# For a rate without a setting, which is compared only against the median.
_NO_LIMIT = 1e-9
_SLOW_LINK = (
    "NCCL has lost rails or fell back to TCP: cluster.env.NCCL_DEBUG=INFO prints the network in use; "
    "NCCL_IB_HCA selects the rails, NCCL_SOCKET_IFNAME the interface for TCP, NCCL_NET_PLUGIN the plugin of the fabric"
)
_SHM_FIX = (
    "make it larger (--shm-size of a container engine; /etc/fstab of the node), or set loader.num_workers=0 and "
    "cluster.preflight.min_shm_mib=0"
)
_DISK_FIX = "free space, set runs= to another folder, or lower the limit in cluster.preflight"
_READ_FIX = (
    "the node's mount or network is slow, or the file system is busy: compare with another node, or lower "
    "cluster.preflight.min_read_mib_s"
)
_SLOW_GLOO = "gloo uses the interface of GLOO_SOCKET_IFNAME, or by default that of the node's own name"
# `srun --label` puts the number of the task before each line.
_LABELED = re.compile(r"\s*(\d+): ?(.*)", re.DOTALL)
# Messages of srun and slurmstepd about a node that could not run its part of a step.
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.*)")
_STEPD = re.compile(r"slurmstepd(?:-(\S+))?: error: (.*)")
_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,\[\]-]+: (.*)")
_WHOLE = re.compile(r"srun: error: (?:Unable to (?:create|confirm allocation)|Unable to create step)\S* ?(.*)")
_NOT_A_CAUSE = ("*** STEP", "*** JOB", "Failed to send MESSAGE_TASK_EXIT", "couldn't chdir")
# From the script's time limit for the step; the message of a busy node itself may come too late.
_CANCELED = (" CANCELLED AT ", "srun: forcing job termination")
_BY_CANCELING = (": Killed", ": Terminated", ": Exited with exit code 137", ": Exited with exit code 143")
_STOPPED = ("Job step aborted", "Force Terminated")
# Fixes by a part of the message about a node; the first match counts.
_FIXES = {
    "pyxis": "check the image (cluster.image), cluster.mounts, and the free space for Enroot's folders",
    "Out Of Memory": "another job uses the node's memory, or cluster.memory is too small",
    "Permission denied": "make it and its folders readable and executable there for the user of the job",
    "No such file": "mount the environment on this node, or set cluster.python to one on a shared file system",
    "credential": "the node's clock or its munge key differs from the controller's",
    "": "run the command there by hand (`srun --nodelist={0}`); see `scontrol show node {0}`, its slurmd.log and dmesg",
}


@dataclass(frozen=True)
class Fault:
    """One fault of a node, or of several, separated by commas, if the measurements do not show which is faulty."""

    node: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.node}: {self.what}" + (f"\n  fix:   {self.fix}" if self.fix else "")


def culprits(faults: Sequence[Fault], nodes: Sequence[str]) -> dict[str, str]:
    """Return the nodes to exclude from a job, and why; none if most are faulty, or if a fault has no clear cause."""
    # Ranks that fail or wait because of another, faulty node report faults too.
    caused = [fault for fault in faults if not fault.what.startswith(_NOT_ITS_OWN)]
    own = {fault.node: fault.what for fault in reversed(caused) if "," not in fault.node}
    is_clear = all(set(fault.node.split(",")) & own.keys() for fault in caused if "," in fault.node)
    return own if own and is_clear and 2 * len(own) <= len(nodes) else {}


def judge_nodes(
    lines: Iterable[str],
    nodes: Sequence[str],
    limits: PreflightConfig,
    *,
    gpus: int = 0,
    code: str = "",
    srun: Iterable[str] = (),
    tasks_per_node: int = 1,
) -> tuple[list[Fault], str]:
    """Return the faults, causes before the timeouts that they may have caused, and lines about the healthy nodes.

    Only the lines of `run_checks` are read. The code of every node must have the digest `code`, if given. The errors of
    the srun that ran the step, `srun`, explain why a node has not answered.
    """
    answers, reported = _read(lines)
    causes, was_stopped = read_srun(srun, [node for node in nodes for _ in range(tasks_per_node)])
    facts = {node: answers[node] for node in nodes if node in answers}
    silent = [node for node in nodes if node not in answers]
    fix = "check whether the step began there (slurmd.log, `scontrol show node {0}`); exclude it with "
    fix += "cluster.exclude={0}. If an image is unpacked first, raise cluster.preflight.timeout_s"
    faults = [Fault(node, *causes[node]) for node in silent if node in causes]
    # If srun ended the step because of one node, the others had no chance to answer.
    if not (faults and was_stopped):
        faults += [Fault(node, "no answer from the node", fix.format(node)) for node in silent if node not in causes]
    faults += [fault for node in facts for fault, is_late in reported.items() if fault.node == node and not is_late]
    faults += [Fault(node, *fault) for node in facts for fault in _below_limits(facts[node], limits, gpus, code)]
    faults += _differences(facts)
    measured: dict[str, Any] = next((found["all-reduce"] for found in facts.values() if "all-reduce" in found), {})
    faults += _slow_links(measured, limits)
    faults += _slow_ranks(measured.get("ranks_s", []), limits)
    faults += [fault for node in facts for fault, is_late in reported.items() if fault.node == node and is_late]
    return faults, "\n".join([_summary(list(facts.values())), *_notes(facts)])


def _read(lines: Iterable[str]) -> tuple[dict[str, dict[str, Any]], dict[Fault, bool]]:
    """Return the facts by node and check (of the last rank, if several), and all faults, with True for a timeout."""
    answers: dict[str, dict[str, Any]] = {}
    faults: dict[Fault, bool] = {}
    for line in lines:
        try:
            entry = json.loads(re.sub(r"^\s*\d+: ?", "", line))
            node, check = entry["node"], entry["check"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        of_node = answers.setdefault(node, {})
        if "facts" in entry:
            of_node[check] = entry["facts"]
            continue
        where = f" ({entry['where']})" if entry.get("where") else ""
        rank = f"rank {entry['rank']}, " if "rank" in entry else ""
        fault = Fault(node, f"{rank}{check}: {entry['error']}{where}", entry.get("fix", ""))
        faults.setdefault(fault, bool(entry.get("late")))
    return answers, faults


def _below_limits(
    facts: dict[str, dict[str, Any]], limits: PreflightConfig, gpus: int, code: str
) -> Iterable[tuple[str, str]]:
    there = facts.get("gpus", {}).get("gpus", [])
    if "gpus" in facts and len(there) < gpus:
        fix = f"set cluster.gpus_per_node={len(there)}, or drain the node: a GPU has fallen off the bus"
        yield f"gpus: nvidia-smi shows {len(there)}, the job asks for {gpus}", fix
    # Only on a node that the job does not share; on a shared node, the other GPUs belong to other jobs.
    for number, gpu in enumerate(there if gpus and len(there) == gpus else ()):
        if gpu["used_mib"] > _UNUSED_GPU_MIB:
            what = f"gpus: {gpu['used_mib']:,} MiB of GPU {number} are in use before the job has begun"
            yield what, "end the process that an earlier job left there, or drain the node"
    for check, name, lowest, what, fix in (
        ("shm", "mib", limits.min_shm_mib, "/dev/shm has {:,} MiB, loader workers need {:,}", _SHM_FIX),
        ("disk", "gib", limits.min_disk_gib, "{:.1f} GiB are free for the run's folder, {:g} are required", _DISK_FIX),
        ("disk", "free", limits.min_inodes, "{:,} files can be created for the run, {:,} are required", _DISK_FIX),
        ("read rate", "mib_s", limits.min_read_mib_s, "{:.3g} MiB/s, {:g} are required", _READ_FIX),
    ):
        for place, found in facts.items():
            if place.startswith(check) and found.get(name, lowest) < lowest:
                yield f"{place}: {what.format(found[name], lowest)}", fix
    if code and facts.get("versions", {}).get("code", code) != code:
        fix = "build the image again (docker/build.sh), mount the checkout over it (cluster.mounts, DIR:/opt/harness), "
        fix += "or run the image's own code: cluster.preflight.same_code=false"
        yield f"versions: the code or configs of the container differ from those that submitted the job ({code})", fix
    offset_s = facts.get("first node", {}).get("offset_s", 0.0)
    if abs(offset_s) > limits.max_clock_offset_s:
        what = f"clock: {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} that of the first node"
        yield what, "start chronyd or ntpd on it: logs, file times and Kerberos tickets depend on the clock"


def _slow_links(facts: dict[str, Any], limits: PreflightConfig) -> Iterable[Fault]:
    """Yield the nodes whose all-reduces are below a limit, or much slower than on the other nodes."""
    backend = facts.get("backend", "")
    fix = _SLOW_LINK if backend == "nccl" else _SLOW_GLOO

    def fault(nodes: str, links: str, rate: float, least: float, how: str = "") -> Fault:
        return Fault(nodes, f"{links}: {backend} all-reduces {rate:.3g} GB/s{how}, {least:.3g} are required", fix)

    within, pairs = facts.get("node_rates_s", {}), facts.get("pair_rates_s", {})
    least = _least(within.values(), limits.min_node_gb_s)
    yield from (fault(node, "links within the node", rate, least) for node, rate in within.items() if rate < least)
    least = _least(pairs.values(), limits.min_pair_gb_s)
    slow = {name: rate for name, rate in pairs.items() if rate < least}
    met = Counter(node for name in pairs for node in name.split(" "))
    slow_with = Counter(node for name in slow for node in name.split(" "))
    # Nodes that are slow with all others, while the others are fast among themselves.
    named = [node for node, count in slow_with.items() if count == met[node]]
    if len(named) < len(met):
        for node in named:
            rate = min(rate for name, rate in slow.items() if node in name.split(" "))
            yield fault(node, "links to other nodes", rate, least, " with each")
            slow = {name: rate for name, rate in slow.items() if node not in name.split(" ")}
    for name, rate in slow.items():
        yield fault(name.replace(" ", ","), "the link between them", rate, least)
    ranks, rate = facts.get("ranks", 1), facts.get("rate_s", 0.0)
    nodes = list(dict.fromkeys(entry["node"] for entry in facts.get("ranks_s", [])))
    if len(nodes) > 1 and rate < limits.min_all_gb_s:
        yield fault(",".join(nodes), "links between all nodes", rate, limits.min_all_gb_s, f" over {ranks} ranks")


def _slow_ranks(ranks: Sequence[dict[str, Any]], limits: PreflightConfig) -> Iterable[Fault]:
    """Yield the nodes of slow GPUs, or of slow CPUs, which may be shared and are compared only against the limit."""
    on_gpus = any("from_host_gb_s" in entry for entry in ranks)
    for name, what, lowest, unit in (
        ("gemm_tflops", "a matrix product reaches", limits.min_gemm_tflops, "TFLOP/s"),
        ("copy_gb_s", "its memory copies reach", _NO_LIMIT, "GB/s"),
    ):
        least = _least([entry[name] for entry in ranks if name in entry], lowest) if on_gpus else lowest
        for rank, entry in enumerate(ranks):
            if entry.get(name, least) < least:
                fix = "check its temperature, power limit and clocks (nvidia-smi -q -d PERFORMANCE), or drain the node"
                text = f"processor of rank {rank}: {what} {entry[name]:.3g} {unit}, {least:.3g} are required"
                yield Fault(entry["node"], text, fix)


def _least(rates: Iterable[float], limit: float) -> float:
    """Return the limit, or a fraction of the median if it is higher and there are at least 3 rates; 0 stays 0."""
    values = list(rates)
    return max(limit, _LEAST_SHARE * statistics.median(values)) if len(values) > 2 and limit > 0 else limit


def _differences(facts: dict[str, dict[str, dict[str, Any]]]) -> Iterable[Fault]:
    """Yield the nodes whose facts differ from most nodes, or from the first node if there is a tie."""
    for check in dict.fromkeys(check for of_node in facts.values() for check in of_node):
        if check not in _SAME_EVERYWHERE and not check.startswith(("dataset ", "weights ", "live chunks ", COPY_OF)):
            continue
        compared = {node: _comparable(of_node[check]) for node, of_node in facts.items() if check in of_node}
        for key in dict.fromkeys(key for values in compared.values() for key in values):
            values = {node: of_node.get(key) for node, of_node in compared.items()}
            expected, _ = Counter(values.values()).most_common(1)[0]
            reference = next(node for node, value in values.items() if value == expected)
            for node, value in values.items():
                if value != expected:
                    fix = _SAME_EVERYWHERE.get(check, "copy it there again, or name one path that all nodes share")
                    yield Fault(node, f"{check}: {key} is {value}, on {reference} it is {expected}", fix)


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a check that must be equal on all nodes; names ending in `_s` are measurements."""
    if "gpus" in facts:
        kinds = sorted(gpu["name"] for gpu in facts["gpus"])
        return {"number of GPUs": len(kinds), "kind of GPU": ", ".join(dict.fromkeys(kinds)), "driver": facts["driver"]}
    return {key: value for key, value in facts.items() if not key.endswith("_s")}


def _notes(facts: dict[str, dict[str, dict[str, Any]]]) -> Iterable[str]:
    """Yield the notes about nodes, which are not faults, each once for all nodes that share it."""
    noted = [(note, node) for node, of_node in facts.items() for note in of_node.get("gpus", {}).get("notes", [])]
    for note, count in Counter(note for note, _ in noted).items():
        others = f" and {count - 1} more" if count > 1 else ""
        yield f"  note: {dict(reversed(noted))[note]}{others}: {note}"


def _summary(nodes: Sequence[dict[str, dict[str, Any]]]) -> str:
    facts = nodes[0] if nodes else {}
    parts = [f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"]
    if "versions" in facts:
        versions = facts["versions"]
        parts += [f"{len(facts.get('gpus', {}).get('gpus', []))} GPUs each"]
        parts += [f"{name} {versions[name]}" for name in ("python", "torch", "megatron-core")]
        offsets_s = [abs(of_node.get("first node", {}).get("offset_s", 0.0)) for of_node in nodes]
        parts += [f"clocks within {max(offsets_s) * 1e3:.1f} ms"]
    for check, copied in facts.items():
        if check.startswith(COPY_OF):
            took_s = max(of_node.get(check, {}).get("took_s", 0.0) for of_node in nodes)
            parts += [f"{check}: {copied['bytes'] / 2**30:.3g} GiB in {copied['files']:,} files, after {took_s:.0f} s"]
    if "all-reduce" in facts:
        reduced = facts["all-reduce"]
        parts += [f"all-reduce by {reduced['backend']} over {reduced['ranks']} ranks in {reduced['seconds_s']:.1f} s"]
        pairs = reduced.get("pair_rates_s", {})
        parts += [f"{reduced['rate_s']:.3g} GB/s"]
        parts += [f"{min(pairs.values()):.3g} to {max(pairs.values()):.3g} GB/s between two nodes"] if pairs else []
    return ", ".join(parts)


def read_srun(lines: Iterable[str], nodes: Sequence[str]) -> tuple[dict[str, tuple[str, str]], bool]:
    """Return, from srun's errors, the cause and fix for nodes that missed a step, and if srun stopped the others."""
    causes: dict[str, tuple[str, str]] = {}
    ends: dict[str, tuple[str, str]] = {}
    printed: dict[str, str] = {}
    was_stopped = was_canceled = False
    for line in map(str.strip, lines):
        label = _LABELED.fullmatch(line)
        of_task = nodes[int(label[1])] if label is not None and int(label[1]) < len(nodes) else None
        text = label[2] if label is not None else line
        was_stopped |= any(words in text for words in _STOPPED)
        was_canceled |= any(words in text for words in _CANCELED)
        if launch := _LAUNCH.fullmatch(text):
            causes[launch[1]] = _explain(launch[2], launch[1])
        elif stepd := _STEPD.fullmatch(text):
            node = stepd[1] or of_task
            if node is not None and not stepd[2].startswith(_NOT_A_CAUSE):
                causes.setdefault(node, _explain(stepd[2], node))
        elif ended := _ENDED.fullmatch(text):
            for node in _expand(ended[1], nodes):
                ends[node] = _explain(ended[2], node)
        elif whole := _WHOLE.match(text):
            causes.update({node: (f"launch: {text.removeprefix('srun: error: ')}", whole[1]) for node in nodes})
        elif of_task is not None and text:
            printed[of_task] = text
    for node, (what, fix) in ends.items():
        if was_canceled and what.endswith(_BY_CANCELING):
            continue  # killed by the time limit of the step
        causes.setdefault(node, (f"{what}: {printed[node][:300]}" if node in printed else what, fix))
    return causes, was_stopped


def _explain(message: str, node: str) -> tuple[str, str]:
    fix = next(fix for part, fix in _FIXES.items() if part in message)
    return f"launch: {message.removeprefix('execve(): ')}", fix.format(node)


def _expand(names: str, nodes: Sequence[str]) -> list[str]:
    """Return the nodes in a list such as `gpu[01-03,07],login1`."""
    found = []
    for prefix, ranges, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]+)\])?([^,\[\]]*)", names):
        if not ranges:
            found.append(prefix + suffix)
        for part in ranges.split(",") if ranges else ():
            first, _, last = part.partition("-")
            width = len(first)
            found += [f"{prefix}{number:0{width}d}{suffix}" for number in range(int(first), int(last or first) + 1)]
    return [node for node in found if node in nodes]
