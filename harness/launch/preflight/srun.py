"""Read from the messages of srun and slurmstepd why a node could not run its part of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# `srun --label` puts the number of the task before each line.
_LABEL = re.compile(r"(\d+): ?(.*)", re.DOTALL)
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.*)")
_STEPD = re.compile(r"slurmstepd(?:-(\S+))?: error: (.*)")
_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,\[\]-]+: (.*)")
_WHOLE = re.compile(r"srun: error: (?:Unable to (?:create|confirm allocation)|Unable to create step)\S* ?(.*)")
_NOT_A_CAUSE = ("*** STEP", "*** JOB", "Failed to send MESSAGE_TASK_EXIT", "couldn't chdir")
# By the time limit that the script sets for the step; a busy node's own line about it may come too late.
_CANCELED = (" CANCELLED AT ", "srun: forcing job termination")
_BY_CANCELING = (": Killed", ": Terminated", ": Exited with exit code 137", ": Exited with exit code 143")
_STOPPED = ("Job step aborted", "Force Terminated")

# What a message is about, by a part of it: the first that fits. The fix says what to do on this node.
_KINDS = (
    (
        "pyxis",
        "container",
        "look at the image (cluster.image), at cluster.mounts, and at free space for Enroot's folders",
    ),
    (
        "enroot",
        "container",
        "look at the image (cluster.image), at cluster.mounts, and at free space for Enroot's folders",
    ),
    ("oom", "memory", "another job uses the node's memory, or cluster.memory is too little"),
    ("Out Of Memory", "memory", "another job uses the node's memory, or cluster.memory is too little"),
    (
        "Permission denied",
        "permission",
        "make it readable and executable there for the user of the job, folders included",
    ),
    (
        "bad interpreter",
        "interpreter",
        "the script names an interpreter that this node does not have: set cluster.python",
    ),
    (
        "No such file or directory",
        "interpreter",
        "mount the environment on this node, or set cluster.python to one on a shared file system",
    ),
    ("Exec format error", "interpreter", "the node has another processor than the environment was built for"),
    ("credential", "launch", "the node's clock or its munge key differs from the controller's"),
    ("uthentication", "launch", "the node's clock or its munge key differs from the controller's"),
)
_LAUNCH_FIX = "its slurmd does not start steps: `scontrol show node {0}` and its slurmd.log have the cause"
_ENDED_FIX = "run the command there by hand (`srun --nodelist={0}`), and look at the kernel's log"


def read_srun(lines: Iterable[str], nodes: Sequence[str]) -> tuple[dict[str, tuple[str, str]], bool]:
    """Return by node what kept it from its part of a step and the fix, and whether srun stopped the others for it.

    Args:
        lines: the errors of `srun --label` of a step with one task per node.
        nodes: of the job, in the order of the tasks.
    """
    causes: dict[str, tuple[str, str]] = {}
    ends: dict[str, tuple[str, str]] = {}
    printed: dict[str, str] = {}
    was_stopped = was_canceled = False
    for line in map(str.strip, lines):
        label = _LABEL.fullmatch(line)
        of_task = nodes[int(label[1])] if label is not None and int(label[1]) < len(nodes) else None
        text = label[2] if label is not None else line
        was_stopped |= any(words in text for words in _STOPPED)
        was_canceled |= any(words in text for words in _CANCELED)
        if launch := _LAUNCH.fullmatch(text):
            causes[launch[1]] = (f"launch: {launch[2]}", _LAUNCH_FIX.format(launch[1]))
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
            continue  # by the time limit of the step
        if what.startswith("launch: ") and node in printed:
            causes.setdefault(node, (f"{what}: {printed[node][:300]}", fix))
        causes.setdefault(node, (what, fix))
    return causes, was_stopped


def _explain(message: str, node: str) -> tuple[str, str]:
    message = message.removeprefix("execve(): ")
    for part, kind, fix in _KINDS:
        if part in message:
            return f"{kind}: {message}", fix
    return f"launch: {message}", _ENDED_FIX.format(node)


def _expand(names: str, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that a list such as `gpu[01-03,07],login1` names."""
    found = []
    for prefix, ranges, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]+)\])?([^,\[\]]*)", names):
        if not ranges:
            found.append(prefix + suffix)
        for part in ranges.split(",") if ranges else ():
            first, _, last = part.partition("-")
            width = len(first)
            found += [f"{prefix}{number:0{width}d}{suffix}" for number in range(int(first), int(last or first) + 1)]
    return [node for node in found if node in nodes]
