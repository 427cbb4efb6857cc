"""Changes for other projects in docs/upstream: each applies to its newest release, and its test needs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import ROOT, Environment
from trainers import HERE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
PATCHES = ROOT / "docs/upstream"


@dataclass(frozen=True)
class Change:
    """A patch, and where the package that it changes lies in the sources of its project.

    Attributes:
        project: as `upstream_tests.py` names it.
        package: folder of the package below the packages of an environment.
        fails: what pytest counts where the patch's test runs without the change.
        sources: folder of the packages in the project's sources.
        without: environment without the change; None for the one of the release.
    """

    patch: str
    project: str
    package: str
    fails: str
    sources: str = "."
    without: str | None = None


# Of Transformer Engine, Python code alone: the library that it calls takes gigabytes.
RELEASES = {
    f"{package}-{release}": Environment(
        f"{package}-{release}", ("einops",), alone=(f"{package}=={release}",), newer=True
    )
    for package, release in (
        ("transformer_engine", "2.20.2"),
        ("transformer_engine", "2.17.1"),
        ("megatron_core", "0.16.1"),
    )
}
CHANGES = (
    Change("megatron-core-hybrid-cp-workload", "megatron_core", "megatron/core", "1 error"),
    Change("megatron-bridge-replicated-state", "megatron_bridge", "megatron/bridge", "4 failed, 3 passed", "src"),
    Change("megatron-bridge-consumed-samples", "megatron_bridge", "megatron/bridge", "5 failed", "src"),
    # The release is correct; 0.16.1 is not.
    Change(
        "megatron-core-expert-gradient-groups",
        "megatron_core",
        "megatron/core",
        "4 failed, 16 passed",
        without="megatron_core-0.16.1",
    ),
    # The release is correct; the last one that was not is 2.17.1.
    Change(
        "transformer-engine-tail-padding",
        "transformer_engine",
        "transformer_engine",
        "2 failed, 4 passed",
        without="transformer_engine-2.17.1",
    ),
)


def packages_of(environment: Environment, package: str) -> Path:
    """Return the folder of packages that holds this one, in the environment or in the one below it."""
    (own,) = environment.folder.glob("lib/python*/site-packages")
    below = Path((own / "below.pth").read_text().strip())
    return next(folder for folder in (own, below) if (folder / package).is_dir())


def run_test(change: Change, folder: Path, python: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the test that a patch adds, on the packages of a folder."""
    tests = re.findall(r"^\+\+\+ b/(\S*/test_\w+\.py)$", (PATCHES / f"{change.patch}.patch").read_text(), re.MULTILINE)
    assert len(tests) == 1
    return subprocess.run(
        [python, "-W", "ignore", HERE / "upstream_tests.py", change.project, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.patch)
def test_a_patch_applies_to_the_newest_release_and_its_test_passes_with_it_alone(change, trainer, tmp_path) -> None:
    environment = trainer("megatron_bridge").environment  # with Megatron-Core 0.19
    if change.project == "transformer_engine":
        environment = RELEASES["transformer_engine-2.20.2"]
        environment.make()
    released = packages_of(environment, change.package)
    sources = tmp_path / change.sources
    shutil.copytree(released / change.package, sources / change.package, ignore=shutil.ignore_patterns("__pycache__"))

    patch = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-i", PATCHES / f"{change.patch}.patch"]
    applied = subprocess.run(patch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stdout + applied.stderr

    passed = run_test(change, tmp_path, environment.python, sources)
    assert passed.returncode == 0, passed.stdout[-4000:] + passed.stderr[-2000:]

    if change.without is not None:
        environment = RELEASES[change.without]
        environment.make()
        released = packages_of(environment, change.package)
    failed = run_test(change, tmp_path, environment.python, released)
    assert change.fails in failed.stdout, failed.stdout[-4000:] + failed.stderr[-2000:]


def test_every_patch_is_tested_and_listed() -> None:
    patches = {file.stem for file in PATCHES.glob("*.patch")}

    assert {change.patch for change in CHANGES} == patches
    assert set(re.findall(r"\(([\w-]+)\.patch\)", (PATCHES / "README.md").read_text())) == patches
