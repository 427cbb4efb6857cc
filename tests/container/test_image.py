"""The image, built by `docker/build.sh` on a base in place of NVIDIA's, and training inside it.

The base has Python 3.12, PyTorch for CUDA, a Transformer Engine without kernels, and older packages than this project
pins, held by a constraint of pip. Its PyTorch is that of the environment of `.ci/versions`, mounted instead of copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.recipes.parity import make_dataset

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASE, TAG = "localhost/harness-test-base", "localhost/harness-test:latest"
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
def packages() -> str:
    """The mount of the base's PyTorch."""
    done = subprocess.run([ROOT / ".ci" / "versions"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("needs Python 3.12")
    assert done.returncode == 0
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return f"{run(done.stdout.strip(), '-c', where).stdout.strip()}:/opt/standin/packages:ro"


@pytest.fixture(scope="module")
def image(packages: str) -> Iterator[str]:
    missing = [name for name in ("buildah", "podman", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and the Debian packages buildah podman runc mmdebstrap (missing: {missing})")
    base = base_name()
    if base not in run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").stdout.split():
        run(HERE / "base.sh", base, Path(packages.partition(":")[0]).parents[2] / "bin" / "python")
    # Without the layers of an earlier build, whose installation is not printed again.
    built = build(base, packages, "--no-cache")
    assert re.search(rf"built {TAG} on {base}, [\d.]+ .B", built), built
    assert "the base contradicts the pins of tokenizers, transformers: without them" in built
    assert "loss_of_one_step" in built
    first = run("buildah", "images", "--quiet", TAG).stdout.strip()
    yield TAG
    # A test may have built it again, which leaves the first one without a name.
    run("buildah", "rmi", "--force", TAG)
    run("buildah", "rmi", "--force", first, check=False)


def base_name() -> str:
    return f"{BASE}:{hashlib.sha256((HERE / 'base.sh').read_bytes()).hexdigest()[:12]}"


def build(base: str, packages: str, *options: str) -> str:
    """Build the image, and return what is printed."""
    passed_on = [*BUILD, f"--volume={packages}", *options]
    done = run("docker/build.sh", "--base", base, "--tag", TAG, "--", *passed_on, ENGINE="buildah")
    return done.stdout + done.stderr


@pytest.fixture
def start(image: str, packages: str, tmp_path: Path):
    """Run a command in the image with `docker/run.sh`, within the limits of this machine."""
    settings = tmp_path / "containers.conf"
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=16384:16384", "nproc=32768:32768"]\nnetns = "none"\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n'
    )

    def in_image(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fixed = {"ENGINE": "podman", "IMAGE": image, "ULIMITS": "", "SHM_SIZE": "2g", "CONTAINERS_CONF": str(settings)}
        return run("docker/run.sh", "-v", packages, *arguments, check=False, **{**fixed, **environment})

    return in_image


def test_the_base_keeps_its_packages_and_those_added_are_listed_with_their_hashes(start) -> None:
    done = start("sh", "-c", "python3 docker/smoke.py --quick && cat /opt/harness-install/sbom.json")
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, rest = done.stdout.partition("\n")
    versions = json.loads(first)["versions"]
    assert (versions["python"][:5], versions["transformer-engine"]) == ("3.12.", "2.14.0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions["megatron-sft-harness"] == project["version"]
    listed = {component["name"]: component for component in json.loads(rest)["components"]}
    of_base = {name: listed[name]["version"] for name in ("click", "regex", "huggingface-hub", "torch")}
    kept = {"click": "8.1.8", "regex": "2024.11.6", "huggingface-hub": "0.36.0"}
    assert of_base == {**kept, "torch": versions["torch"]}
    assert listed["megatron-core"]["version"] == versions["megatron-core"]
    assert listed["megatron-core"]["hashes"][0]["content"] in (ROOT / "docker" / "hashes.txt").read_text()
    assert "hashes" not in listed["torch"]


def test_training_runs_as_another_user_and_writes_to_a_mounted_folder(start, tmp_path) -> None:
    make_dataset(tmp_path / "data")
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o777)
    runs.chmod(0o777)
    job = "torchrun --standalone --nproc-per-node 2 -m harness.recipes.sft data.path=/data run_dir=/runs/a"
    mounts = f"-v {tmp_path / 'data'}:/data -v {runs}:/runs"
    done = start(*mounts.split(), "--", *job.split(), "trainer.steps=3", "trainer.eval_batches=1")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if step["step"]] == [1, 2, 3]
    assert (runs / "a").stat().st_uid == os.geteuid()


def test_the_nightly_tests_are_collected_and_run_in_the_image_and_buckets_are_supported(start) -> None:
    done = start("python3", *["-m", "pytest", "-n", "0", "-m", "nightly", "--collect-only", "-q", "tests"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "tests/nightly/test_matrix.py::" in done.stdout
    done = start(
        "sh",
        "-c",
        "python3 -c 'import boto3, obstore' && python3 -m pytest -n 0 -q tests/unit/schedule/test_as_packed.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_too_little_shared_memory_fails_the_health_check(start) -> None:
    done = start("python3", "docker/smoke.py", "--quick", SHM_SIZE="64m")
    assert done.returncode == 1
    assert "/dev/shm has 64 MiB, workers need 1024: start with a larger --shm-size" in done.stderr


def test_the_image_has_a_normal_user_and_a_health_check(image) -> None:
    config = json.loads(run("buildah", "inspect", "--type", "image", image).stdout)["Docker"]["config"]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "/opt/harness/docker/smoke.py", "--quick"]


def test_a_change_of_code_rebuilds_without_installing_dependencies(image, packages) -> None:
    change = ROOT / "recipes" / "_changed.py"
    change.write_text(f"# {uuid.uuid4()}\n")
    try:
        printed = build(base_name(), packages)
    finally:
        change.unlink()
    assert "to be added" not in printed
    assert "loss_of_one_step" in printed
