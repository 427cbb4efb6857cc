"""`docker/install.py` adds packages to a base image and changes none: real pip, wheels made by the tests."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

pytestmark = pytest.mark.submission

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def make_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel with one module that holds its version."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": f"origin = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},\n"
        for path, text in files.items()
    )
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


# What a build backend does of which `setup.py` downloads a wheel unless it is forced to compile.
BACKEND = """
import os
import zipfile

def build_wheel(folder, *_):
    import torch

    info, name = "mamba_ssm-2.3.dist-info", "mamba_ssm-2.3-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("mamba_ssm.py", f"built = {torch.origin!r}, {os.environ.get('MAMBA_FORCE_BUILD')!r}")
        needs = "Requires-Dist: torch>=2.99\\nRequires-Dist: tilelang==0.1.8\\n"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: mamba-ssm\\nVersion: 2.3\\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def make_source(folder: Path) -> str:
    """Write a source archive of mamba-ssm 2.3 that imports PyTorch when it is built; return its hash."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: mamba-ssm\nVersion: 2.3\n",
        "pyproject.toml": '[build-system]\nrequires = ["ninja"]\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
    }
    path = folder / "mamba_ssm-2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"mamba_ssm-2.3/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


PROJECT = """
[project]
name = "thing"
dependencies = ["reader>=2"]
[project.optional-dependencies]
train = ["torch>=2.6", "trainer>=1", "old>=3; python_version < '3'"]
report = ["thing[train]", "plotter"]
"""


def make_base(folder: Path) -> Path:
    venv.create(folder / "venv", with_pip=True)
    make_wheel(folder / "base", "torch", "2.9.0a0+nv26.6")
    make_wheel(folder / "base", "helper", "1.0")
    wheels = sorted((folder / "base").glob("*.whl"))
    subprocess.run(
        [folder / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "--no-index", *wheels], check=True
    )
    for name, version, *needs in (
        ("torch", "2.99"),
        ("helper", "2.0"),
        ("reader", "2.0"),
        ("reader", "2.1"),
        ("trainer", "1.0", "torch>=2.6"),
        ("trainer", "1.5", "torch>=2.6", "helper"),
        ("trainer", "2.0", "torch>=2.10"),
        ("plotter", "1.0"),
        ("plotter", "3.0"),
    ):
        make_wheel(folder / "wheels", name, version, *needs)
    (folder / "install").mkdir()
    shutil.copy(DOCKER / "install.py", folder / "install" / "install.py")
    return folder


class Image:
    """A virtual environment in place of a base image, with a torch that no index has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        self.write("", PROJECT)

    def write(self, pins: str, project: str) -> None:
        (self.folder / "install" / "constraints.txt").write_text(pins)
        (self.folder / "install" / "pyproject.toml").write_text(project)

    def install(self, *arguments: str, theirs: str = "") -> subprocess.CompletedProcess[str]:
        (self.folder / "their-constraints.txt").write_text(theirs)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder / "wheels"),
            "PIP_CONSTRAINT": str(self.folder / "their-constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }
        return subprocess.run(
            [self.python, self.folder / "install" / "install.py", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def versions(self) -> dict[str, str]:
        code = "import importlib.metadata as m; print(*(f'{d.name}={d.version}' for d in m.distributions()))"
        printed = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout
        return dict(word.split("=", 1) for word in printed.split())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "image")


@pytest.fixture
def image(base: Path, tmp_path: Path) -> Image:
    # A copy, because creating it takes seconds.
    shutil.copytree(base, tmp_path / "image", symlinks=True)
    return Image(tmp_path / "image")


def test_the_torch_and_the_constraints_of_the_base_are_kept(image: Image) -> None:
    image.write("plotter==1.0\nreader==2.1\ntorch==2.99\n", PROJECT)
    done = image.install("--extras", "report", theirs="reader==2.0\n")
    assert done.returncode == 0, done.stdout + done.stderr
    versions = image.versions()
    assert versions["torch"] == "2.9.0a0+nv26.6"
    assert versions["helper"] == "1.0"
    assert versions["reader"] == "2.0", "the constraint of the base overrides the project's pin"
    assert versions["plotter"] == "1.0", "a package that the base does not constrain is pinned"
    assert versions["trainer"] == "1.5", "a newer version would need another torch"
    assert "to be added: reader>=2 trainer>=1 plotter" in done.stdout
    assert image.install("--extras", "report").stdout.strip().endswith("to be added:")


def test_pins_that_the_base_contradicts_give_way(image: Image) -> None:
    """`helper` of the base is older than the one that the pinned version needs."""
    make_wheel(image.folder / "wheels", "reader", "3.0", "helper>=2")
    image.write("reader==3.0\nplotter==1.0\n", PROJECT)
    done = image.install("--extras", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the base contradicts the pins of reader: without them" in done.stdout
    versions = image.versions()
    assert (versions["helper"], versions["reader"], versions["plotter"]) == ("1.0", "2.1", "1.0")


def test_an_archive_of_a_locked_version_must_have_its_hash(image: Image) -> None:
    hashes, wheel = image.folder / "install" / "hashes.txt", image.folder / "wheels" / "reader-2.1-py3-none-any.whl"
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    hashes.write_text(f"reader==2.1 --hash=sha256:{'0' * 64}\n")
    done = image.install("--extras", "train")
    assert done.returncode != 0
    assert f"the archive of reader==2.1 has another hash than in hashes.txt: {right}" in done.stderr
    assert "reader" not in image.versions()
    hashes.write_text(f"reader==2.1 --hash=sha256:{'0' * 64} --hash=sha256:{right}\n")
    done = image.install("--extras", "train")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not in hashes.txt, with the hash of the index: trainer==1.5" in done.stdout
    assert image.install("--sbom", str(image.folder / "sbom.json")).returncode == 0
    listed = {part["name"]: part for part in json.loads((image.folder / "sbom.json").read_text())["components"]}
    assert listed["reader"]["hashes"] == [{"alg": "SHA-256", "content": right}]
    assert listed["torch"]["version"] == "2.9.0a0+nv26.6"


def test_kernels_are_compiled_with_the_torch_of_the_base_from_archives_with_their_hashes(image: Image) -> None:
    right = make_source(image.folder / "wheels")
    # The wheel of another place and another version.
    make_wheel(image.folder / "wheels", "mamba-ssm", "2.3")
    image.write("", PROJECT + 'scan = ["mamba-ssm==2.3", "plotter"]\n')
    hashes = image.folder / "install" / "hashes.txt"
    for given, message in (("", "hashes.txt has no hash of mamba-ssm==2.3"), ("0" * 64, "DO NOT MATCH THE HASHES")):
        hashes.write_text(f"mamba-ssm==2.3 --hash=sha256:{given}\n" if given else "")
        done = image.install("--extras", "scan")
        assert done.returncode != 0
        assert message in done.stderr
        assert "mamba-ssm" not in image.versions()
    hashes.write_text(f"mamba-ssm==2.3 --hash=sha256:{right}\n")
    done = image.install("--extras", "scan")
    assert done.returncode == 0, done.stdout + done.stderr
    built = subprocess.run([image.python, "-c", "import mamba_ssm; print(*mamba_ssm.built)"], capture_output=True)
    assert built.stdout.decode().split() == ["2.9.0a0+nv26.6", "TRUE"]
    versions = image.versions()
    assert (versions["torch"], versions["plotter"]) == ("2.9.0a0+nv26.6", "3.0")
    assert "tilelang" not in versions
    assert image.install("--sbom", str(image.folder / "sbom.json")).returncode == 0
    listed = {part["name"]: part for part in json.loads((image.folder / "sbom.json").read_text())["components"]}
    assert listed["mamba-ssm"]["hashes"] == [{"alg": "SHA-256", "content": right}]


def scan_lines() -> list[str]:
    """Return the lines of hashes.txt of what the extra `scan` names, and of what these need besides the base."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["scan"]
    names = {Requirement(line).name for line in extra} | {"fla-core"}
    lines = [line for line in (DOCKER / "hashes.txt").read_text().splitlines() if line.partition("==")[0] in names]
    assert len(lines) == len(names)
    assert {pin for pin in extra if "==" in pin} <= {line.split()[0] for line in lines}
    return lines


def test_each_kernel_of_the_extra_is_pinned_and_has_its_hash() -> None:
    assert all("--hash=sha256:" in line for line in scan_lines())


@pytest.mark.install
def test_the_index_has_the_kernels_with_the_locked_hashes_as_archives_with_cuda_sources(tmp_path) -> None:
    (tmp_path / "exact.txt").write_text("\n".join(scan_lines()))
    compiled = "mamba-ssm,causal-conv1d"
    how = (
        "--no-deps",
        "--require-hashes",
        "--no-build-isolation",
        f"--no-binary={compiled}",
        "--disable-pip-version-check",
    )
    # Without a compiler, only the names and the versions of the archives are asked for.
    skip = {f"{name}_SKIP_CUDA_BUILD": "TRUE" for name in ("MAMBA", "CAUSAL_CONV1D")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *how, "--dest", tmp_path, "--requirement", tmp_path / "exact.txt"],
        env={**os.environ, **skip},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    archives = sorted(tmp_path.glob("*.tar.gz"))
    assert [path.name.rpartition("-")[0] for path in archives] == ["causal_conv1d", "mamba_ssm"]
    for path in archives:
        with tarfile.open(path) as archive:
            assert any(name.endswith(".cu") for name in archive.getnames()), path
    assert len([*tmp_path.glob("*.whl")]) == len(scan_lines()) - 2


def test_the_locked_hashes_are_those_of_the_pinned_versions() -> None:
    pins = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    environment = {"python_version": "3.12"}
    pinned = {
        f"{pin.name}{pin.specifier}"
        for pin in map(Requirement, filter(None, pins))
        if not pin.marker or pin.marker.evaluate(environment)
    }
    locked = [line.split()[0] for line in (DOCKER / "hashes.txt").read_text().splitlines() if line[0] != "#"]
    names = {pin.partition("==")[0] for pin in pinned}
    assert [pin for pin in locked if pin.partition("==")[0] in names and pin not in pinned] == []
    assert {"numpy", "pyarrow", "tokenizers", "megatron-core"} <= {pin.partition("==")[0] for pin in locked}


def test_a_dependency_that_needs_another_torch_is_refused(image: Image) -> None:
    image.write("", PROJECT.replace("trainer>=1", "trainer>=2"))
    done = image.install("--extras", "train")
    assert done.returncode != 0
    assert "the packages of the base image are its constraints" in done.stderr
    assert image.versions()["torch"] == "2.9.0a0+nv26.6"


def test_packages_of_the_base_that_are_too_old_are_named_and_torch_is_never_replaced(image: Image) -> None:
    image.write("", PROJECT.replace("torch>=2.6", "torch>=2.10").replace("reader>=2", "helper>=2"))
    done = image.install("--extras", "train")
    assert done.returncode != 0
    assert "torch 2.9.0a0+nv26.6 is in the base image, the project needs >=2.10" in done.stderr
    assert "helper 1.0 is in the base image, the project needs >=2" in done.stderr
    done = image.install("--extras", "train", "--allow-upgrade", "torch")
    assert "torch of the base image are never replaced" in done.stderr
    image.write("", PROJECT.replace("reader>=2", "helper>=2"))
    done = image.install("--extras", "train", "--allow-upgrade", "helper")
    assert done.returncode == 0, done.stdout + done.stderr
    assert image.versions()["helper"] == "2.0"
    assert image.install("--extras", "nothing").stderr.startswith("install.py: pyproject.toml has no extra 'nothing'")


def test_the_pinned_base_fits_the_project() -> None:
    pinned = dict(line.split("=", 1) for line in (DOCKER / "versions.env").read_text().splitlines() if line[0] != "#")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(pinned["BASE_PYTHON"])
    image, _, tag = pinned["BASE_IMAGE"].partition(":")
    assert image
    assert tag
    assert tag != "latest"
    train = {need.name: need for need in map(Requirement, project["optional-dependencies"]["train"])}
    assert train["megatron-core"].specifier.contains(pinned["MEGATRON_CORE"])
    environment = {"python_version": pinned["BASE_PYTHON"]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    (core,) = [
        pin for pin in pins if pin.name == "megatron-core" and (not pin.marker or pin.marker.evaluate(environment))
    ]
    assert core.specifier.contains(Version(pinned["MEGATRON_CORE"]))


def test_the_scripts_report_wrong_arguments() -> None:
    for script, arguments, message in (
        ("build.sh", ["--nonsense"], "unknown argument --nonsense"),
        ("run.sh", [], "no command"),
        ("run.sh", ["-v"], "-v needs HOST:CONTAINER"),
    ):
        done = subprocess.run([DOCKER / script, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert message in done.stderr
