"""`make release` in a clone: a tag, archives that install, and their provenance; or a refusal that changes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from .test_install import ROOT, VERSION

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]


def git(clone: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", *arguments]
    return subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True).stdout.strip()


def release(clone: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["make", "release"], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone with the files of this checkout, committed."""
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-tags", str(ROOT), str(folder))
    for name in git(ROOT, "diff", "--name-only", "--diff-filter=d", "HEAD").splitlines():
        shutil.copy(ROOT / name, folder / name)
    for name in ("user.name", "user.email"):
        git(folder, "config", name, "tests")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "the files of the checkout")
    return folder


def describe(clone: Path, version: str) -> None:
    page = clone / "CHANGELOG.md"
    page.write_text(page.read_text().replace(f"## {VERSION}", f"## {version}\n\n- A change.\n\n## {VERSION}", 1))
    git(clone, "commit", "--quiet", "--all", "--message", "changelog")


def test_a_release_is_tagged_built_installed_and_has_provenance_and_is_made_once(clone) -> None:
    describe(clone, "9.8.7")
    code, output = release(clone)
    assert code == 0, output
    assert git(clone, "tag", "--list") == "v9.8.7"
    assert git(clone, "log", "-1", "--format=%s") == "release 9.8.7"
    dist = clone / "dist"
    statement = json.loads((dist / "provenance.intoto.json").read_text())
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir() if path.suffix != ".json"
    }
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == found
    assert sorted(found) == ["megatron_sft_harness-9.8.7-py3-none-any.whl", "megatron_sft_harness-9.8.7.tar.gz"]
    source, *_ = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"]["gitCommit"] == git(clone, "rev-parse", "HEAD")
    code, output = release(clone)
    assert code != 0
    assert "there already is a tag v9.8.7" in output


@pytest.mark.parametrize(
    ("version", "is_dirty", "message"),
    [
        ("0.1.9", False, f"CHANGELOG.md begins with 0.1.9, and pyproject.toml already has {VERSION}"),
        ("Unreleased", False, "write the section of the new version first"),
        ("9.8.7", True, "the working tree has changes that are not committed"),
        ("9.8.7", False, "the build failed"),
    ],
)
def test_a_release_that_cannot_be_made_leaves_no_tag_and_no_commit(clone, version, is_dirty, message) -> None:
    describe(clone, version)
    if message == "the build failed":
        with (clone / "pyproject.toml").open("a") as file:
            file.write("[unfinished\n")
        git(clone, "commit", "--quiet", "--all", "--message", "a broken file")
    if is_dirty:
        (clone / "README.md").write_text("changed")
    before = git(clone, "rev-parse", "HEAD")
    code, output = release(clone)
    assert code != 0
    assert message in output
    assert (git(clone, "tag", "--list"), git(clone, "rev-parse", "HEAD")) == ("", before)
    assert not (clone / "dist").exists()
