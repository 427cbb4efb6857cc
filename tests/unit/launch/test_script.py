"""The batch script: every line of it in golden files, and its shell functions run by a real shell."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.launch.cluster import ClusterConfig, SubmitConfig, time_limit_s
from harness.launch.script import Job, part, render

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "sbatch"
JOB = Job(
    name="sft_8b",
    nodes=4,
    module="harness.recipes.sft",
    overrides=("experiment=sft_8b", "trainer.steps=1000"),
    run_dir="/shared/runs/sft_8b-001",
    workdir="/shared/harness",
    python="/shared/venv/bin/python",
    data=("/shared/data/sft",),
    copied=("/shared/data/sft",),
)
CASES = {
    "srun": ["cluster=h100_ib", "cluster.account=research", "cluster.successor=afterany"],
    "torchrun": ["cluster=h100_ib", "cluster.launcher=torchrun"],
    "srun_pyxis": ["cluster=h100_pyxis"],
    "srun_spares": [
        *("cluster=h100_pyxis", "cluster.spares=2", "cluster.mpi=none"),
        *("cluster.container_name=true", "cluster.container_writable=true"),
    ],
    "srun_local": ["cluster=h100_pyxis", "cluster.spares=1", "cluster.local_dir=/scratch/me"],
    "torchrun_cpu": ["cluster=local_cpu", "cluster.launcher=torchrun", "cluster.preflight.enabled=false"],
}


def cluster_of(*overrides: str) -> ClusterConfig:
    return compose_config("submit", SubmitConfig, list(overrides)).cluster


@pytest.mark.parametrize("name", list(CASES))
def test_every_line_of_the_script_is_that_of_the_golden_file(name, tmp_path):
    """If the change is intended, copy the file that the failure names over the golden file."""
    rendered = tmp_path / f"{name}.sbatch"
    rendered.write_text(render(JOB, cluster_of(*CASES[name])))
    assert rendered.read_text() == (GOLDEN / rendered.name).read_text(), rendered


@pytest.mark.parametrize("name", [file.stem for file in sorted((CONFIGS / "cluster").glob("*.yaml"))])
def test_every_cluster_composes_and_bash_parses_its_script(name):
    text = render(replace(JOB, nodes=1), cluster_of(f"cluster={name}"))
    assert text.splitlines()[2].startswith("# harness.recipes.sft on 1 node, rendered by")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def run_bash(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **variables}
    return subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=False)


def test_settings_reach_the_recipe_unchanged_through_the_shell():
    odd = ("a=x y", "b='single' \"double\"", "c=$HOME `id` \\", "d=[{path: 'p q', weight: 0.5}]", "e=*", "f=#g;|&<>")
    job = Job(**{**vars(JOB), "overrides": odd, "data": ("/d/a b$c",), "weights": "/w x", "live": ("/l", "/m")})
    text = render(job, ClusterConfig(env={"G": "$HOME 'x'"}))
    line = next(line for line in text.splitlines() if line.startswith("program="))
    show = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    done = run_bash(f'{line}\n{show} "${{program[@]}}"')
    assert tuple(json.loads(done.stdout)[3:-2]) == odd
    assert "'data.path=[/d/a b$c]' 'model.init_from=/w x' 'data.live.path=[/l,/m]' \\\n    cluster.preflight.t" in text
    assert "export G='$HOME '\"'\"'x'\"'\"''" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("04:00:00", 14400), ("2-12", 216_000), ("1-00:30", 88_200), ("1-00:00:05", 86_405)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text, seconds):
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.time=soon", "time is 'soon'"),
        ("cluster.successor=maybe", "'maybe' is not known"),
        ("cluster.launcher=mpirun", "'mpirun' is not known"),
        ("cluster.time='3:00'", "asked to stop 180 s before a time limit of 180 s"),
        ("cluster.gpus_per_node=4", "8 ranks per node on 4 GPUs"),
        ("cluster.account='a b'", "sbatch would misread"),
        ("cluster.sbatch=[-t1]", "'-t1' is not an option"),
        ("cluster.mounts=[/a:/b]", "cluster.mounts is /a:/b, and cluster.image is empty"),
        ("cluster.container_name=true", "container_name is true, and cluster.image is empty"),
        ("cluster.local_dir=scratch", "'scratch' is not an absolute path"),
        ("cluster.mpi='pmix; rm'", "sbatch would misread"),
        ("+cluster.env.A-B=1", "'A-B' is not a variable name"),
    ],
)
def test_a_wrong_setting_of_a_cluster_is_refused(override, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        cluster_of("cluster=h100_ib", override)


PORT = part("rendezvous").partition("first_node=")[0] + 'choose_port && echo "$MASTER_PORT"\n'


def test_a_job_takes_the_port_of_its_id_and_ids_that_share_it_take_others_while_it_runs():
    first = subprocess.Popen(
        ["bash", "-c", PORT + "read -r"],
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "424242"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        taken = int(first.stdout.readline())
        others = [int(run_bash(PORT, SLURM_JOB_ID=str(424242 + step)).stdout) for step in (0, 12000, 120000)]
    finally:
        first.communicate("\n", timeout=60)
    assert 20000 <= taken < 32000
    assert taken not in others
    assert int(run_bash(PORT, SLURM_JOB_ID="424242").stdout) == taken
    free = int(run_bash(PORT, SLURM_JOB_ID="77").stdout)
    with socket.create_server(("127.0.0.1", free)):
        assert int(run_bash(PORT, SLURM_JOB_ID="77").stdout) != free


IMAGE_COPY = part("copy_image").partition("copy_image='")[2].partition("'\n")[0]


def copy_image(image: Path, target: Path, digest: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", IMAGE_COPY, "copy", str(image), str(target), digest]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_image_is_copied_once_continued_and_refused_with_another_hash(tmp_path):
    """The part of the script that runs on every node."""
    image, target = tmp_path / "images" / "x.sqsh", tmp_path / "local" / "images" / "x.sqsh"
    image.parent.mkdir()
    image.write_bytes(os.urandom(300_000))
    digest, stamp = hashlib.sha256(image.read_bytes()).hexdigest(), f"300000-{int(image.stat().st_mtime)}"
    partial = target.with_name(f"x.sqsh.{stamp}.partial")
    target.parent.mkdir(parents=True)
    partial.write_bytes(image.read_bytes()[:100_000])
    target.with_name("x.sqsh.1-2.partial").write_bytes(b"of an older image")
    done = copy_image(image, target, digest)
    assert (done.returncode, done.stderr, target.read_bytes()) == (0, "", image.read_bytes())
    assert sorted(path.name for path in target.parent.iterdir()) == ["x.sqsh", "x.sqsh.copied", "x.sqsh.lock"]
    was = target.stat()
    assert copy_image(image, target, "not read").returncode == 0
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (was.st_ino, was.st_mtime_ns)
    image.write_bytes(b"another image")
    done = copy_image(image, target, digest)
    assert (done.returncode, target.exists()) == (1, False)
    assert "has another hash than the original" in done.stderr


# Slurm may signal the first process of a step, or all of them.
@pytest.mark.parametrize("send_signal", [os.kill, os.killpg])
def test_the_ranks_of_torchrun_get_the_signal_and_its_agent_survives_it(tmp_path, send_signal):
    """Run the part of the script that runs on every node, with a stand-in for the agent that starts two ranks."""
    text = render(JOB, cluster_of("cluster=local_cpu", "cluster.launcher=torchrun"))
    start_node = text.partition("start_node='")[2].partition("'\n")[0]
    # Like a real run, a rank ends once, however many signals it gets, and a moment later: Bash 5.2 loses the exit code
    # of a child that ends in the very moment in which a signal interrupts its wait.
    rank = "import os, signal, time; caught = []; signal.signal(signal.SIGUSR2, lambda *_: caught.append(1)); "
    rank += "print('ready', flush=True)\nwhile not caught: time.sleep(0.05)\ntime.sleep(1); os._exit(75)"
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import subprocess, sys\n"
        f"ranks = [subprocess.Popen([sys.executable, '-c', {rank!r}]) for _ in range(2)]\n"
        "print([rank.wait() for rank in ranks], flush=True)\n"
        "sys.exit(3)\n"
    )
    variables = {
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "SLURM_JOB_ID": "1",
        "PATH": "/usr/bin:/bin",
    }
    node = subprocess.Popen(
        ["bash", "-c", start_node, "node", sys.executable, "-u", str(agent)],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert [node.stdout.readline().strip() for _ in range(2)] == ["ready", "ready"]
    send_signal(node.pid, signal.SIGUSR2)
    printed, _ = node.communicate(timeout=60)
    assert (printed.strip(), node.returncode) == ("[75, 75]", 3)
