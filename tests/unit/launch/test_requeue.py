"""Shell functions of the batch script that talk to Slurm, run by a real shell with a scripted `scontrol`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.launch.cluster import ClusterConfig
from harness.launch.script import forwarding, part

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
RUNNING = "JobId=42 JobName=sft JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1"
REQUEUED = RUNNING.replace("RUNNING", "COMPLETING").replace("Restarts=0", "Restarts=1")
CANCELED = RUNNING.replace("RUNNING", "COMPLETING")
AT_LIMIT = CANCELED.replace("Reason=None", "Reason=TimeLimit")
# Answers each command with the next line of its script, and repeats the last one; a line that begins with `!` is an
# error, and `KILL` one that a signal ends. A `requeue` without one makes `show` answer that the job is requeued, and
# ends the script, as Slurm does.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, signal, sys
folder = pathlib.Path({{folder!r}})
name = pathlib.Path(sys.argv[0]).name
verb = name if name != "scontrol" else sys.argv[1]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join([name, *sys.argv[1:]]) + "\\n")
if sys.argv[1:3] == ["show", "hostnames"]:
    sys.exit(print(*sys.argv[3].split(","), sep="\\n"))
answers = json.loads((folder / "answers").read_text())
lines = answers.get(verb, [""])
answer = lines.pop(0) if len(lines) > 1 else lines[0]
if verb == "requeue" and answer == "":
    answers["show"] = [{REQUEUED!r}]
(folder / "answers").write_text(json.dumps(answers))
if verb == "requeue" and answer == "":
    os.kill(int(os.environ["SCRIPT"]), signal.SIGTERM)
if answer == "KILL":
    os.kill(os.getpid(), signal.SIGTERM)
print(answer.lstrip("!"))
sys.exit(answer.startswith("!"))
"""


@dataclass
class Ended:
    code: int
    printed: str
    calls: list[str]


@pytest.fixture
def script(tmp_path: Path):
    """script(commands, answers, env): run them after the functions of the batch script of job 42."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("scontrol", "sbatch", "scancel", "sinfo"):
        (programs / name).write_text(PROGRAM.format(folder=str(tmp_path)))
        (programs / name).chmod(0o755)
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()

    def run(commands: str, *, cluster: ClusterConfig | None = None, **answers: list[str]) -> Ended:
        (tmp_path / "answers").write_text(json.dumps(answers))
        # Waits take no time here.
        start = f"set -uo pipefail\nexport SCRIPT=$$\nrun_dir={tmp_path}/run logs={tmp_path}/logs\nsleep() {{ :; }}"
        spares = part("spares", nodes=2, ranks=4, master_addr="$first_node-ib")
        text = "\n".join([start, part("controller"), forwarding(cluster or ClusterConfig()), spares, commands])
        done = subprocess.run(
            ["bash", "-c", text],
            env={
                "PATH": f"{programs}:/usr/bin:/bin",
                "SLURM_JOB_ID": "42",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "n1,n2,n3,n4",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )
        calls = tmp_path / "calls"
        return Ended(done.returncode, done.stdout, calls.read_text().splitlines() if calls.exists() else [])

    return run


def test_a_requeue_is_repeated_until_the_controller_is_back(script):
    away = [f"!{AWAY}"] * 30
    ended = script("run_again", show=[*away, RUNNING], requeue=[f"!{AWAY}", f"!{AWAY}", ""])
    assert ended.code == 1
    assert ended.calls.count("scontrol requeue 42") == 3
    assert ended.printed.count("no answer from Slurm") == 1  # not once per try
    assert "requeued at" in ended.printed


def test_a_requeue_that_a_dying_controller_forgot_is_repeated(script):
    ended = script("run_again", show=[RUNNING], requeue=["forgotten", f"!{AWAY}", ""])
    assert (ended.code, ended.calls.count("scontrol requeue 42")) == (1, 3)


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_a_job_that_is_signaled_before_its_ranks_have_begun_is_requeued(script, name):
    ended = script(f"kill -{name} $$\nwait", show=[RUNNING], requeue=[""])
    assert "scontrol requeue 42" in ended.calls
    assert (ended.code, ended.printed.split()[0]) == (1, name)


def test_a_canceled_job_is_not_requeued_and_takes_its_successor_with_it(script, tmp_path):
    (tmp_path / "run" / "_job").write_text("42\n")
    (tmp_path / "logs" / "successor-42").write_text("43\n")
    ended = script("run_again", show=[CANCELED])
    assert "cancelled: the job is not requeued" in ended.printed
    assert ended.calls[-1] == "scancel 43"
    assert not [call for call in ended.calls if "requeue" in call]
    assert not (tmp_path / "run" / "_job").exists()


def test_a_job_at_its_time_limit_is_requeued_before_slurm_kills_its_script(script):
    ended = script("trap '' TERM; before_the_kill", show=[AT_LIMIT], requeue=[""])
    assert "at the time limit: requeued" in ended.printed
    assert "scontrol requeue 42" in ended.calls


@pytest.mark.parametrize("state", [RUNNING, REQUEUED])  # preempted with grace, or requeued by Slurm
def test_a_job_that_slurm_requeues_itself_is_left_alone(script, state, tmp_path):
    (tmp_path / "run" / "_job").write_text("42\n")
    ended = script("before_the_kill", show=[state])
    assert [call.split()[:2] for call in ended.calls] == [["scontrol", "show"]]
    assert (tmp_path / "run" / "_job").exists()


def test_a_job_that_slurm_refuses_to_requeue_submits_a_successor_without_the_failed_nodes(script, tmp_path):
    (tmp_path / "run" / "_job").write_text("42\n")
    (tmp_path / "run" / "excluded_nodes").write_text("n7 all-reduce: 0.1 GB/s\nn3 gpus: 7 of 8\nn7 again\n")
    (tmp_path / "run" / "job.sbatch").write_text("#!/bin/bash\n")
    refused = "!Requested operation is presently disabled for job 42"
    ended = script("run_again", cluster=ClusterConfig(exclude="n1"), show=[RUNNING], requeue=[refused], sbatch=["43;x"])
    assert "Slurm does not requeue job 42: Requested operation is presently disabled" in ended.printed
    expected = "sbatch --parsable --dependency=afterany:42 --exclude=n1,n3,n7 --export=ALL,HARNESS_PREDECESSOR=42"
    assert ended.calls[-1] == f"{expected} {tmp_path}/run/job.sbatch"
    assert (tmp_path / "logs" / "successor-42").read_text() == "43\n"
    # The successor finds there that the run is not over.
    assert (tmp_path / "run" / "_job").read_text() == "42\n"


def test_nodes_that_failed_are_left_out_when_the_job_is_requeued(script, tmp_path):
    (tmp_path / "run" / "excluded_nodes").write_text("n7 all-reduce: 0.1 GB/s\n")
    ended = script("run_again", show=[RUNNING], requeue=[""])
    assert "scontrol update JobId=42 ExcNodeList=n7" in ended.calls
    assert "left out from now on: n7" in ended.printed


def test_commands_that_slurm_ends_with_the_script_are_repeated(script, tmp_path):
    """A requeue sends TERM to all processes of the script."""
    (tmp_path / "run" / "excluded_nodes").write_text("n7 all-reduce: 0.1 GB/s\n")
    ended = script("run_again", show=["KILL", RUNNING], requeue=["KILL", ""], update=["KILL", "KILL", ""])
    assert ended.printed.count("left out from now on: n7") == 1
    assert "cannot be left out" not in ended.printed
    assert (ended.code, ended.calls.count("scontrol requeue 42")) == (1, 2)


@pytest.mark.parametrize(
    ("owner", "answer", "claims"),
    [
        (None, [], True),
        ("42", [], True),
        ("41", [RUNNING], False),
        ("41", [CANCELED], False),
        ("41", [RUNNING.replace("RUNNING", "PENDING")], True),
        ("41", [RUNNING.replace("RUNNING", "TIMEOUT")], True),
        ("41", ["!slurm_load_jobs error: Invalid job id specified"], True),
        ("41", [f"!{AWAY}", RUNNING], False),
    ],
)
def test_one_job_at_a_time_has_the_run(script, tmp_path, owner, answer, claims):
    path = tmp_path / "run" / "_job"
    if owner:
        path.write_text(f"{owner}\n")
    ended = script(part("claim"), show=answer or [RUNNING])
    assert (ended.code, path.read_text().strip()) == ((0, "42") if claims else (2, "41"))
    assert claims or "job 42 ends without touching it" in ended.printed
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["_job"]


@pytest.mark.parametrize(
    ("owner", "state", "continues"),
    [
        ("41", "TIMEOUT", True),
        ("41", "NODE_FAIL", True),
        ("41", "CANCELLED", False),  # perhaps while it was pending after a requeue
        (None, "COMPLETED", False),
        ("40", "FAILED", False),  # a job in between ended the run, or has it
    ],
)
def test_a_successor_continues_only_a_run_that_its_predecessor_could_not_end(script, tmp_path, owner, state, continues):
    if owner:
        (tmp_path / "run" / "_job").write_text(f"{owner}\n")
    text = f"HARNESS_PREDECESSOR=41\n{part('claim')}\necho continues"
    ended = script(text, show=[RUNNING.replace("RUNNING", state)])
    assert ("continues" in ended.printed, ended.code) == (continues, 0)
    assert continues or "nothing is left for its successor" in ended.printed


SLOW = "n2 rank 5 on n2 has taken 3.0 times as long as the others for 10 steps: it waits for its data\n"


@pytest.mark.parametrize(("others", "is_left_out"), [("n1\nn3\nn2", True), ("n1\nn2", False)])
def test_a_slow_node_is_left_out_if_the_partition_has_enough_others(script, tmp_path, others, is_left_out):
    (tmp_path / "logs" / "straggler-42.failed").write_text(SLOW)
    ended = script('here=; leave_out_slow; echo "here=$here"', sinfo=[others])
    assert "too slow: rank 5 on n2 has taken 3.0 times" in ended.printed
    assert f"here={'false' if is_left_out else 'true'}" in ended.printed
    assert (tmp_path / "run" / ("excluded_nodes" if is_left_out else "kept_nodes")).read_text() == SLOW
    assert not (tmp_path / "run" / ("kept_nodes" if is_left_out else "excluded_nodes")).exists()
    assert not (tmp_path / "logs" / "straggler-42.failed").exists()
    if not is_left_out:
        assert "without these nodes the partition has 1, and the job needs 2" in ended.printed


CHOICE = 'on_first_node=(); container=(); choose_nodes\nshown() { echo "$MASTER_ADDR" "${train_on[@]}"; }\n'


def test_a_spare_node_takes_the_place_of_a_slow_one_in_the_same_job(script, tmp_path):
    (tmp_path / "logs" / "straggler-42.failed").write_text(SLOW)
    ended = script(f"{CHOICE}shown; leave_out_slow; shown; echo here=$here", cluster=ClusterConfig(spares=2))
    assert [line for line in ended.printed.splitlines() if not line.startswith("too slow")] == [
        "training on n1 n2, spare: n3 n4",
        "n1-ib --nodelist=n1,n2",
        "training on n1 n3, spare: n4",
        "n1-ib --nodelist=n1,n3",
        "here=true",
    ]
    assert (tmp_path / "run" / "excluded_nodes").read_text() == SLOW


@pytest.mark.parametrize(
    ("reason", "rank", "expected"),
    [("hang", 5, "n1,n3"), ("LostRankError", 2, "n2,n3"), ("RuntimeError", 5, "n1,n2"), ("lost", None, "n1,n2")],
)
def test_the_node_of_a_rank_that_died_or_hung_is_replaced_at_the_restart(script, tmp_path, reason, rank, expected):
    attempt = {"step": 4, "reason": reason, "message": "x", "rank": rank, "requeue": True, "job": "42"}
    (tmp_path / "run" / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    ended = script(f"{CHOICE}replace_failed; shown", cluster=ClusterConfig(spares=2))
    assert ended.printed.splitlines()[-1] == f"{expected[:2]}-ib --nodelist={expected}"


def test_a_node_that_is_down_does_not_train_and_without_spares_the_nodes_stay(script, tmp_path):
    attempt = {"step": 4, "reason": "hang", "message": "x", "rank": 0, "requeue": True, "job": "42"}
    (tmp_path / "run" / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    ended = script(f"{CHOICE}shown; replace_failed; shown", cluster=ClusterConfig(spares=2), sinfo=["n1\nn2"])
    assert ended.printed.splitlines() == [
        "training on n3 n4, spare: ",
        "n3-ib --nodelist=n3,n4",
        "training on n3 n4, spare: ",
        "n3-ib --nodelist=n3,n4",
    ]
    assert not (tmp_path / "run" / "excluded_nodes").exists()
