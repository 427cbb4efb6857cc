"""The image, built by `docker/build.sh` on a base in place of NVIDIA's, and training inside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.parity import make_dataset

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE, TAG = "localhost/harness-test-base:latest", "localhost/harness-test:latest"
# For engines without user namespaces or cgroups, such as those inside a container.
BUILD = ["--isolation=chroot", "--pull-never"]


def run(*command: str | Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    missing = [name for name in ("buildah", "podman", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and the Debian packages buildah podman runc mmdebstrap (missing: {missing})")
    if BASE not in run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").stdout.split():
        run(HERE / "base.sh", BASE, f"torch=={importlib.metadata.version('torch')}")
    run("docker/build.sh", "--base", BASE, "--tag", TAG, "--", *BUILD, ENGINE="buildah")
    yield TAG
    run("buildah", "rmi", "--force", TAG)


@pytest.fixture
def start(image: str, tmp_path: Path):
    """Run a command in the image with `docker/run.sh`, within the limits of this machine."""
    settings = tmp_path / "containers.conf"
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]\nnetns = "none"\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
    )

    def in_image(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fixed = {"ENGINE": "podman", "IMAGE": image, "ULIMITS": "", "SHM_SIZE": "2g", "CONTAINERS_CONF": str(settings)}
        return run("docker/run.sh", *arguments, check=False, **{**fixed, **environment})

    return in_image


def test_the_base_keeps_its_torch_and_the_smoke_test_prints_the_versions(start) -> None:
    done = start("python3", "docker/smoke.py", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    versions = json.loads(done.stdout.splitlines()[-1])["versions"]
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["megatron-core"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions["megatron-sft-harness"] == project["version"]


def test_training_runs_as_another_user_and_writes_to_a_mounted_folder(start, tmp_path) -> None:
    make_dataset(tmp_path / "data")
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o777)
    runs.chmod(0o777)
    job = "torchrun --standalone --nproc-per-node 2 -m recipes.sft data.path=/data run_dir=/runs/a trainer.steps=3"
    mounts = f"-v {tmp_path / 'data'}:/data -v {runs}:/runs"
    done = start(*mounts.split(), "--", *job.split(), "trainer.eval_batches=1")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert (runs / "a").stat().st_uid == os.geteuid()


def test_too_little_shared_memory_fails_the_health_check(start) -> None:
    done = start("python3", "docker/smoke.py", "--quick", SHM_SIZE="64m")
    assert done.returncode == 1
    assert "/dev/shm has 64 MiB, workers need 1024: start with a larger --shm-size" in done.stderr


def test_the_image_has_a_normal_user_and_a_health_check(image) -> None:
    config = json.loads(run("buildah", "inspect", "--type", "image", image).stdout)["Docker"]["config"]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "/opt/harness/docker/smoke.py", "--quick"]


def test_a_change_of_code_rebuilds_without_installing_dependencies(image) -> None:
    change = ROOT / "recipes" / "_changed.py"
    change.write_text(f"# {uuid.uuid4()}\n")
    try:
        done = run("docker/build.sh", "--base", BASE, "--tag", TAG, "--", *BUILD, ENGINE="buildah")
    finally:
        change.unlink()
    assert "to be added" not in done.stdout + done.stderr
    assert "loss_of_one_step" in done.stdout + done.stderr
