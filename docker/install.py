"""Install the packages that the base image lacks, without changing any package of the base image.

    install.py --extras train,tokenize     the dependencies of pyproject.toml next to this file, with these extras
    install.py --project FOLDER            the project itself, without dependencies
    install.py --sbom FILE                 write the list of all packages, as CycloneDX has it

NVIDIA builds PyTorch, Transformer Engine and NCCL for each other; other wheels in their place are slower at best. So
every package of the base is a constraint of pip, the base's own constraints (PIP_CONSTRAINT) stay in force, and the
versions are compared afterwards with those from before. A pin of the project that contradicts the base gives way.
Archives of pinned versions must have the hashes of hashes.txt. Needs only Python and pip.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# Never replaced, not even by --allow-upgrade.
PROTECTED = ("torch", "transformer-engine", "triton", "flash-attn", "apex", "nvidia-", "cuda-", "pytorch-triton")
# Source archives, compiled with PyTorch and nvcc of the base; and the variables without which their setup.py downloads
# a wheel, of which no hash is known, and installs it instead.
COMPILED = {"mamba-ssm": "MAMBA_FORCE_BUILD", "causal-conv1d": "CAUSAL_CONV1D_FORCE_BUILD"}
HERE = Path(__file__).resolve().parent
# Versions and hashes of what was installed here; the list of packages has them too.
INSTALLED, INSTALLED_SOURCES = "installed.txt", "installed-sources.txt"
CACHE = Path(tempfile.gettempdir()) / "harness-pip-cache"


def installed() -> dict[str, str]:
    """Return the versions of all installed packages by canonical name."""
    # The finder caches folders that pip has changed since.
    importlib.invalidate_caches()
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # The first on the path is the one that is imported; an older one may follow among the system's packages.
        if package.name:
            versions.setdefault(canonicalize_name(package.name), package.version)
    return versions


def wanted_requirements(project: dict[str, object], extras: Iterable[str]) -> list[Requirement]:
    """Return the dependencies of the project with these extras, including extras that they name."""
    table: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    lines: list[str] = [*project["dependencies"]]  # type: ignore[misc]
    for extra in extras:
        if extra not in table:
            sys.exit(f"install.py: pyproject.toml has no extra {extra!r}, only {', '.join(table)}")
        lines += table[extra]
    own = canonicalize_name(str(project["name"]))
    requirements: list[Requirement] = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if _name(requirement) == own:
            requirements += wanted_requirements({**project, "dependencies": []}, requirement.extras)
        else:
            requirements.append(requirement)
    return requirements


def split(
    wanted: Iterable[Requirement], base: dict[str, str], allowed: set[str]
) -> tuple[list[Requirement], list[str]]:
    """Return the requirements to install, and the conflicts: packages of the base that are too old or too new."""
    missing, conflicts = [], []
    for requirement in wanted:
        version = base.get(_name(requirement))
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        if version is None or _name(requirement) in allowed:
            missing.append(requirement)
        else:
            conflicts.append(
                f"{requirement.name} {version} is in the base image, the project needs {requirement.specifier}"
            )
    return missing, conflicts


def own_pins(base: dict[str, str], allowed: set[str], pins: Path) -> dict[str, str]:
    """Return the project's pins by name, of packages that the base neither has nor constrains."""
    theirs = set(base) - allowed
    for file in os.environ.get("PIP_CONSTRAINT", "").split():
        if Path(file).is_file():
            theirs |= set(_names_in(Path(file).read_text()))
    found: dict[str, str] = {}
    for line in pins.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text and (pin := Requirement(text)) and (pin.marker is None or pin.marker.evaluate()):
            found[_name(pin)] = text
    return {name: text for name, text in found.items() if name not in theirs}


def resolve(wanted: Sequence[str], constraints: Sequence[str], pins: dict[str, str]) -> list[dict[str, Any]]:
    """Return what pip would install, as the entries of its report, by the project's pins as far as the base allows.

    The pins were chosen together with other versions than those of the base: one that these contradict is left out.
    """
    pins = dict(pins)
    while True:
        with tempfile.TemporaryDirectory() as folder:
            limits, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
            limits.write_text("\n".join([*constraints, *pins.values()]) + "\n")
            done = _pip("--quiet", "--dry-run", "--report", str(report), "--constraint", str(limits), *wanted)
            if done.returncode == 0:
                return list(json.loads(report.read_text())["install"])
        clashing = sorted(_in_conflict(done.stderr) & pins.keys())
        if not clashing:
            sys.exit("install.py: pip failed, see above; the packages of the base image are its constraints")
        print(f"install.py: the base contradicts the pins of {', '.join(clashing)}: without them", flush=True)
        for name in clashing:
            del pins[name]


def _in_conflict(errors: str) -> set[str]:
    """Return the packages that pip's message about a conflict names."""
    found = re.search(r"Cannot install (.*?) because", errors)
    names = re.findall(r"(?:^|, | and )([\w.-]+)", found[1] if found else "")
    return {canonicalize_name(name) for name in names}


def pin_of(entry: dict[str, Any]) -> str:
    """Return `name==version` of an entry of pip's report."""
    return f"{canonicalize_name(entry['metadata']['name'])}=={entry['metadata']['version']}"


def hash_of(entry: dict[str, Any]) -> str:
    """Return the SHA-256 of the archive of an entry of pip's report; empty if the index gives none."""
    return str(entry["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", ""))


def read_hashes(path: Path) -> dict[str, list[str]]:
    """Return the hashes by `name==version` of a file of requirements."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {
        line.split()[0]: re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
        for line in lines
        if line.strip() and not line.startswith("#")
    }


def hashed_lines(entries: Iterable[dict[str, Any]], known: dict[str, list[str]]) -> list[str]:
    """Return the requirements that install exactly these archives, by known hashes or those of the index."""
    lines, unknown = [], []
    for entry in entries:
        pin, given = pin_of(entry), hash_of(entry)
        where = entry["download_info"]["url"]
        if pin not in known:
            unknown.append(pin)
        elif given not in known[pin]:
            sys.exit(
                f"install.py: the archive of {pin} has another hash than in hashes.txt: {given or 'none'}\n"
                f"  where: {where}\n"
                "  fix: find out why the index has another archive; for a new platform, run docker/lock.py"
            )
        if not given:
            sys.exit(f"install.py: the index gives no hash of {pin}\n  where: {where}\n  fix: use one that does")
        lines.append(f"{pin} --hash=sha256:{given}")
    if unknown:
        print(f"install.py: not in hashes.txt, with the hash of the index: {', '.join(unknown)}", flush=True)
    return lines


def compile_sources(wanted: Iterable[Requirement], known: dict[str, list[str]]) -> None:
    """Compile and install source archives at the versions that the project pins, by their hashes.

    Their dependencies stay out: mamba-ssm pins packages that only layers of Mamba-3 import, and versions of Triton.
    """
    if not (pins := [f"{_name(requirement)}{requirement.specifier}" for requirement in wanted]):
        return
    if unknown := [pin for pin in pins if not known.get(pin)]:
        sys.exit(f"install.py: hashes.txt has no hash of {', '.join(unknown)}\n  fix: run docker/lock.py")
    os.environ |= dict.fromkeys(COMPILED.values(), "TRUE")
    exact = HERE / INSTALLED_SOURCES
    exact.write_text("".join(f"{pin} {' '.join(f'--hash=sha256:{one}' for one in known[pin])}\n" for pin in pins))
    # Isolated builds would compile for another PyTorch than that of the base.
    how = ("--no-deps", "--no-build-isolation", f"--no-binary={','.join(COMPILED)}", "--require-hashes")
    if _pip(*how, "--requirement", str(exact)).returncode:
        sys.exit("install.py: pip failed, see above: mamba-ssm and causal-conv1d require nvcc and PyTorch in the base")


def install_dependencies(extras: list[str], allowed: set[str]) -> None:
    protected = sorted(name for name in allowed if name.startswith(PROTECTED))
    if protected:
        sys.exit(f"install.py: {', '.join(protected)} of the base image are never replaced; choose another BASE_IMAGE")
    base = installed()
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    missing, conflicts = split(wanted_requirements(project, extras), base, allowed)
    if conflicts:
        sys.exit(
            "install.py: "
            + "\n            ".join(conflicts)
            + "\n  fix: choose another BASE_IMAGE, or list packages that may be replaced in ALLOW_UPGRADE"
        )
    print(f"install.py: {len(base)} packages are in the base image, to be added:", *map(str, missing), flush=True)
    sources = [requirement for requirement in missing if _name(requirement) in COMPILED]
    missing = [requirement for requirement in missing if requirement not in sources]
    known = read_hashes(HERE / "hashes.txt")
    if missing:
        limits = [f"{name}=={version}" for name, version in sorted(base.items()) if name not in allowed]
        entries = resolve([*map(str, missing)], limits, own_pins(base, allowed, HERE / "constraints.txt"))
        exact = HERE / INSTALLED
        exact.write_text("".join(f"{line}\n" for line in hashed_lines(entries, known)))
        # Without dependencies: all of them are in the file.
        if _pip("--no-deps", "--require-hashes", "--requirement", str(exact)).returncode:
            sys.exit("install.py: pip failed, see above")
    compile_sources(sources, known)
    shutil.rmtree(CACHE, ignore_errors=True)
    after = installed()
    changed = [
        f"{name} {version} -> {after.get(name, 'removed')}"
        for name, version in sorted(base.items())
        if after.get(name) != version and name not in allowed
    ]
    if changed:
        sys.exit(f"install.py: packages of the base image have changed: {', '.join(changed)}")


def write_sbom(path: Path) -> None:
    """Write all packages of this Python with versions, licenses and, where they were installed here, hashes."""
    command = [sys.executable, "-m", "pip", "inspect", "--quiet"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    hashes = {**read_hashes(HERE / INSTALLED), **read_hashes(HERE / INSTALLED_SOURCES)}
    components = []
    for package in found["installed"]:
        metadata = package["metadata"]
        name, version = canonicalize_name(metadata["name"]), metadata["version"]
        license = metadata.get("license_expression") or metadata.get("license") or ""
        component: dict[str, Any] = {"type": "library", "name": name, "version": version}
        component["purl"] = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
        if license:  # some packages have the whole text
            component["licenses"] = [{"license": {"name": license.splitlines()[0][:100]}}]
        if given := hashes.get(f"{name}=={version}"):
            component["hashes"] = [{"alg": "SHA-256", "content": one} for one in given]
        components.append(component)
    machine = found["environment"]
    properties = {key: machine[key] for key in ("python_full_version", "platform_machine", "sys_platform")}
    sbom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"properties": [{"name": key, "value": value} for key, value in properties.items()]},
        "components": sorted(components, key=lambda component: component["name"]),
    }
    path.write_text(json.dumps(sbom, indent=1) + "\n")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `pip install`; its errors are printed and returned."""
    # A cache for the calls of one build, each of which downloads the same archives, and not for the image.
    command = [sys.executable, "-m", "pip", "install", f"--cache-dir={CACHE}", "--root-user-action=ignore", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    return done


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def _names_in(text: str) -> Iterable[str]:
    for line in text.splitlines():
        stripped = line.partition("#")[0].strip()
        if stripped and not stripped.startswith("-"):
            try:
                yield canonicalize_name(Requirement(stripped).name)
            except ValueError:  # a path or a URL, which constrains no package of ours
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, separated by commas")
    parser.add_argument(
        "--allow-upgrade", default="", help="packages of the base that may be replaced, separated by commas"
    )
    parser.add_argument("--project", type=Path, help="install the project in this folder, without dependencies")
    parser.add_argument("--sbom", type=Path, help="write the list of all packages to this file")
    arguments = parser.parse_args()
    if arguments.project is not None:
        if _pip("--no-deps", "--editable", str(arguments.project)).returncode:
            sys.exit("install.py: pip failed, see above")
        return
    if arguments.sbom is not None:
        write_sbom(arguments.sbom)
        return
    allowed = {canonicalize_name(name) for name in arguments.allow_upgrade.replace(",", " ").split()}
    install_dependencies([name for name in arguments.extras.split(",") if name], allowed)


if __name__ == "__main__":
    main()
