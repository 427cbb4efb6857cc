"""The jobs of a run in Slurm's queue, and the commands that show, follow and cancel them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.errors import ConfigError, HarnessError
from harness.launch.queue import explain_reason, jobs_of_run, read_excluded
from harness.launch.submit import refuse_second_job


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """slurm(*lines, error=""): a squeue that prints these lines, and a scancel that keeps its arguments."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def program(name: str, text: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    def answer(*lines: str, error: str = "") -> Path:
        (tmp_path / "queue").write_text("".join(f"{line}\n" for line in lines))
        program("squeue", f"cat {tmp_path}/queue; echo '{error}' >&2; exit {int(bool(error))}")
        program("scancel", f'echo "$@" >>{tmp_path}/canceled')
        return tmp_path / "canceled"

    return answer


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "sft-001"
    (folder / "logs").mkdir(parents=True)
    (folder / "job.sbatch").write_text("#!/bin/bash\n")
    return folder


def queued(run_dir: Path) -> list[str]:
    return [
        f"12|RUNNING|1:23|4:00:00|2|2026-11-22T10:00:00|node[1-2]|{run_dir}/job.sbatch",
        f"13|PENDING|0:00|4:00:00|2|N/A|(Dependency)|{run_dir}/job.sbatch",
        "14|RUNNING|9:99|4:00:00|2|2026-11-22T10:00:00|node3|/elsewhere/a|b/job.sbatch",
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("(JobHeldUser)", "`scontrol release 7`"),
        ("(ReqNodeNotAvail, UnavailableNodes:node2)", "down, drained or reserved"),
        ("(QOSMaxGRESPerUser)", "a limit of its QOS is reached"),
        ("(SomethingNew)", ""),
    ],
)
def test_the_reason_of_a_pending_job_is_explained(reason, words):
    assert words in explain_reason(reason, "7")
    assert reason.strip("()") in explain_reason(reason, "7")


def test_the_jobs_of_a_run_are_those_of_its_script_and_the_one_that_has_it(slurm, run_dir):
    slurm(*queued(run_dir))
    running, waiting = jobs_of_run(run_dir)
    assert str(running) == "job 12 is running on node[1-2], 1:23 of 4:00:00"
    assert str(waiting) == "job 13 is pending: it waits for another job to end (Dependency)"
    # Submitted by hand from another file.
    slurm("15|RUNNING|0:01|4:00:00|2|2026-11-22T10:00:00|node1|/home/me/mine.sbatch")
    assert jobs_of_run(run_dir) == []
    (run_dir / "_job").write_text("15\n")
    assert [job.job_id for job in jobs_of_run(run_dir)] == ["15"]
    slurm(error="slurm_load_jobs error: Invalid job id specified")
    assert jobs_of_run(run_dir) == []
    slurm(error="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(HarnessError, match="squeue failed: slurm_load_jobs error: Unable to contact"):
        jobs_of_run(run_dir)


def test_a_second_job_of_a_run_is_refused_with_the_state_of_the_first(slurm, run_dir):
    slurm(*queued(run_dir))
    with pytest.raises(ConfigError, match="already in the queue: job 12 is running on node") as refused:
        refuse_second_job(run_dir)
    assert f"harness cancel {run_dir}" in refused.value.fix
    slurm()
    refuse_second_job(run_dir)


def test_canceling_a_run_cancels_the_job_that_waits_first(slurm, run_dir, harness):
    canceled = slurm(*queued(run_dir))
    code, printed, _ = harness("cancel", run_dir)
    assert (code, canceled.read_text().split()) == (0, ["13", "12"])
    assert "canceled: job 12 is running" in printed
    slurm()
    code, printed, _ = harness("cancel", run_dir)
    assert (code, printed) == (1, f"{run_dir}: no job of this run is in the queue\n")


def test_the_status_of_a_run_shows_its_steps_its_attempts_and_its_jobs(slurm, run_dir, harness):
    slurm(*queued(run_dir))
    (run_dir / "config.yaml").write_text("trainer:\n  steps: 400\n")
    steps = [{"step": step, "loss": 3 - step / 100, "step_s": 1.5} for step in range(1, 101)]
    damaged = b'{"step": "a"}\n[]\n{"stex": 101}\n{"step": \xb2}\n'  # says nothing
    (run_dir / "metrics.jsonl").write_bytes(b"".join(json.dumps(step).encode() + b"\n" for step in steps) + damaged)
    attempt = {"step": 40, "reason": "hang", "message": "rank 1 has died", "rank": 1, "requeue": True, "job": "11"}
    (run_dir / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    (run_dir / "checkpoints" / "step-000080").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000080" / "run.json").write_text("{}")
    (run_dir / "excluded_nodes").write_text("node7 all-reduce: 0.1 GB/s\n")
    code, printed, _ = harness("status", run_dir)
    lines = printed.splitlines()
    assert code == 0
    assert lines[:2] == [f"{run_dir}: running", "  job 12 is running on node[1-2], 1:23 of 4:00:00"]
    assert lines[3].startswith("  step 100 of 400, loss 2.0000, 1.50 s per step, 7 min 30 s left, ")
    assert lines[4:] == [
        "  newest checkpoint: step 80",
        "  ended after step 40: hang: rank 1 has died (job 11)",
        "  excluded: node7: all-reduce: 0.1 GB/s",
    ]
    code, printed, _ = harness("status", run_dir, "--json")
    values = json.loads(printed)
    assert (values["step"], values["steps"], values["is_finished"]) == (100, 400, False)
    assert [job["job_id"] for job in values["jobs"]] == ["12", "13"]
    assert read_excluded(run_dir) == values["excluded"] == {"node7": "all-reduce: 0.1 GB/s"}


def test_a_run_without_a_queue_is_shown_from_its_files(run_dir, harness, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (run_dir / "_stopped.json").write_text("[]")
    (run_dir / "excluded_nodes").write_bytes(b"node\xff\n")
    code, printed, _ = harness("status", run_dir)
    assert code == 0
    assert printed.splitlines()[0] == f"{run_dir}: not finished; its jobs are unknown (squeue is not installed here)"
    code, _, errors = harness("status", tmp_path)
    assert (code, "there is no run in this folder" in errors) == (2, True)


def test_the_log_of_the_newest_job_or_of_one_rank_is_printed(run_dir, harness):
    logs = run_dir / "logs"
    (logs / "sft-9.out").write_text("old\n")
    (logs / "sft-12.out").write_text("one\ntwo\nthree\n")
    (logs / "sft-12-rank0.out").write_text("rank 0\n")
    (logs / "sft-12-rank1.out").write_text("rank 1\n")
    assert harness("logs", run_dir)[1] == "one\ntwo\nthree\n"
    assert harness("logs", run_dir, "--lines", 1)[1] == "three\n"
    assert harness("logs", run_dir, "--rank", 1)[1] == "rank 1\n"
    code, _, errors = harness("logs", run_dir, "--rank", 2)
    assert (code, "--rank is 0 to 1" in errors) == (2, True)
    # Under torchrun the ranks of a node share a log.
    (logs / "sft-13.out").write_text("")
    (logs / "sft-13-node1.out").write_text("agent\n[default0]:rank 2\n[default1]:rank 3\n")
    (run_dir / "job.sbatch").write_text("program=(python -m torch.distributed.run --nnodes=2 --nproc-per-node=2)\n")
    assert harness("logs", run_dir, "--rank", 3)[1] == "[default1]:rank 3\n"


def test_bytes_that_are_no_text_in_the_queue_and_in_files_of_a_run_hide_nothing(slurm, run_dir, harness, tmp_path):
    slurm(*queued(run_dir))
    (tmp_path / "queue").write_bytes(
        b"9|RUNNING|0:01|4:00:00|1|2026|n1|/home/m\xfcller/x\n" + (tmp_path / "queue").read_bytes()
    )
    (run_dir / "_job").write_bytes(b"\xff\n")
    (run_dir / "config.yaml").write_text("trainer:\n  steps: 400\n")
    assert [job.job_id for job in jobs_of_run(run_dir)] == ["12", "13"]
    assert harness("status", run_dir)[0] == 0
    (run_dir / "job.sbatch").write_bytes(b"# \xff\nprogram=(python --nproc-per-node=2)\n")
    (run_dir / "logs" / "sft-12.out").write_text("")
    (run_dir / "logs" / "sft-12-node0.out").write_bytes(b"[default1]:rank \xff\n")
    assert harness("logs", run_dir, "--rank", 1)[1] == "[default1]:rank \ufffd\n"


def test_lines_that_are_written_in_pieces_are_followed_as_a_whole(run_dir, harness, monkeypatch):
    log = run_dir / "logs" / "sft-12-node0.out"
    (run_dir / "logs" / "sft-12.out").write_text("")
    (run_dir / "job.sbatch").write_text("program=(python --nproc-per-node=2)\n")
    log.write_text("[default0]:a\n[default1]:b\n[defau")
    pieces = ["lt1]:c\n[default0]:d\n[default1]:", "e\n", "[default1]:f\n"]

    def write(seconds: float) -> None:
        if not pieces:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write(pieces.pop(0))

    monkeypatch.setattr("harness.cli.jobs.time.sleep", write)
    code, printed, _ = harness("logs", run_dir, "--rank", 1, "--lines", 1, "--follow")
    assert (code, printed.split()) == (130, [f"[default1]:{name}" for name in "bcef"])


def test_every_job_of_a_run_is_canceled_whatever_slurm_says_about_one(slurm, run_dir, harness, tmp_path):
    canceled = slurm(*queued(run_dir))
    for problem, code in (("Invalid job id specified", 0), ("Access/permission denied", 2)):
        program = f'[ $1 = 13 ] && echo "scancel: error: {problem}" >&2 && exit 1; echo "$@" >>{canceled}'
        (tmp_path / "bin" / "scancel").write_text(f"#!/bin/sh\n{program}\n")
        answer = harness("cancel", run_dir)
        assert (answer[0], canceled.read_text()) == (code, "12\n")
        assert code == 0 or problem in answer[2]
        canceled.unlink()
