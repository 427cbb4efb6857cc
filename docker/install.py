"""Install the packages that the base image lacks, without changing any package of the base image.

    install.py --extras train,tokenize     the dependencies of pyproject.toml next to this file, with these extras
    install.py --project FOLDER            the project itself, without dependencies

NVIDIA builds PyTorch, Transformer Engine and NCCL for each other; other wheels in their place are slower at best. So
every package of the base is a constraint of pip, the base's own constraints (PIP_CONSTRAINT) stay in force, and the
versions are compared afterwards with those from before. Needs only Python and pip.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# Never replaced, not even by --allow-upgrade.
PROTECTED = ("torch", "transformer-engine", "triton", "flash-attn", "apex", "nvidia-", "cuda-", "pytorch-triton")
HERE = Path(__file__).resolve().parent


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


def constraint_lines(base: dict[str, str], allowed: set[str], pins: Path) -> list[str]:
    """Return pins of all packages of the base, and the project's pins of packages that the base does not constrain."""
    lines = [f"{name}=={version}" for name, version in sorted(base.items()) if name not in allowed]
    theirs = set(base) - allowed
    for file in os.environ.get("PIP_CONSTRAINT", "").split():
        if Path(file).is_file():
            theirs |= set(_names_in(Path(file).read_text()))
    for line in pins.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text and canonicalize_name(Requirement(text).name) not in theirs:
            lines.append(text)
    return lines


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
    if missing:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraint_lines(base, allowed, HERE / "constraints.txt")) + "\n")
            file.flush()
            _pip("--constraint", file.name, *map(str, missing))
    after = installed()
    changed = [
        f"{name} {version} -> {after.get(name, 'removed')}"
        for name, version in sorted(base.items())
        if after.get(name) != version and name not in allowed
    ]
    if changed:
        sys.exit(f"install.py: packages of the base image have changed: {', '.join(changed)}")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("install.py: pip failed, see above; the packages of the base image are its constraints")


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
    arguments = parser.parse_args()
    if arguments.project is not None:
        _pip("--no-deps", "--editable", str(arguments.project))
        return
    allowed = {canonicalize_name(name) for name in arguments.allow_upgrade.replace(",", " ").split()}
    install_dependencies([name for name in arguments.extras.split(",") if name], allowed)


if __name__ == "__main__":
    main()
