"""Install what the base image lacks, and nothing else: its own packages stay as they are, to the byte.

    install.py --extras train,tokenize     dependencies of pyproject.toml beside this file, with those extras
    install.py --project FOLDER            the project itself, without dependencies

NVIDIA builds PyTorch, Transformer Engine and NCCL for one another; a wheel from elsewhere in their place is slower at
best. So every package of the base is a constraint, the base's own constraints (PIP_CONSTRAINT) stay in force, and
afterwards the versions are compared with those from before. Needs nothing but Python and pip.
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

# Never to be replaced, whatever is asked for.
PROTECTED = ("torch", "transformer-engine", "triton", "flash-attn", "apex", "nvidia-", "cuda-", "pytorch-triton")
HERE = Path(__file__).resolve().parent


def installed() -> dict[str, str]:
    """Versions of all packages by canonical name."""
    # A fresh look: the finder caches folders that pip has changed meanwhile.
    importlib.invalidate_caches()
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        # The first on the path is the one that is imported; a system's Python may hold an older one behind it.
        if one.name:
            found.setdefault(canonicalize_name(one.name), one.version)
    return found


def wanted_requirements(project: dict[str, object], extras: Iterable[str]) -> list[Requirement]:
    """Dependencies of the project with some extras, those that name other extras resolved."""
    table: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    lines: list[str] = [*project["dependencies"]]  # type: ignore[misc]
    for extra in extras:
        if extra not in table:
            sys.exit(f"install.py: pyproject.toml has no extra {extra!r}; there are {', '.join(table)}")
        lines += table[extra]
    own = canonicalize_name(str(project["name"]))
    found = []
    for line in lines:
        one = Requirement(line)
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found += wanted_requirements({**project, "dependencies": []}, one.extras) if _name(one) == own else [one]
    return found


def split(
    wanted: Iterable[Requirement], base: dict[str, str], allowed: set[str]
) -> tuple[list[Requirement], list[str]]:
    """What has to be installed, and what stands in the way: packages of the base that are too old or too new."""
    missing, refused = [], []
    for one in wanted:
        version = base.get(_name(one))
        if version is None:
            missing.append(one)
        elif not one.specifier.contains(version, prereleases=True):
            if _name(one) in allowed:
                missing.append(one)
            else:
                refused.append(f"{one.name} {version} is in the base image, the project needs {one.specifier}")
    return missing, refused


def constraint_lines(base: dict[str, str], allowed: set[str], pins: Path) -> list[str]:
    """The base as it is; for the rest our own pins, but where the base's constraints say something."""
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
    missing, refused = split(wanted_requirements(project, extras), base, allowed)
    if refused:
        sys.exit(
            "install.py: "
            + "\n            ".join(refused)
            + "\n  fix: choose another BASE_IMAGE, or name packages that may be replaced in ALLOW_UPGRADE"
        )
    print(f"install.py: {len(base)} packages are in the base image, to be added:", *map(str, missing), flush=True)
    if missing:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraint_lines(base, allowed, HERE / "constraints.txt")) + "\n")
            file.flush()
            _pip("--constraint", file.name, *map(str, missing))
    found = installed()
    changed = [
        f"{name} {version} -> {found.get(name, 'removed')}"
        for name, version in sorted(base.items())
        if found.get(name) != version and name not in allowed
    ]
    if changed:
        sys.exit(f"install.py: packages of the base image have changed: {', '.join(changed)}")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("install.py: pip failed, see above; the base image's packages are its constraints")


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def _names_in(text: str) -> Iterable[str]:
    for line in text.splitlines():
        stripped = line.partition("#")[0].strip()
        if stripped and not stripped.startswith("-"):
            try:
                yield canonicalize_name(Requirement(stripped).name)
            except ValueError:  # a path or a URL, which names nothing of ours
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="of pyproject.toml, with commas between")
    parser.add_argument("--allow-upgrade", default="", help="packages of the base that may be replaced")
    parser.add_argument("--project", type=Path, help="install this folder's project, without dependencies")
    arguments = parser.parse_args()
    if arguments.project is not None:
        _pip("--no-deps", "--editable", str(arguments.project))
        return
    allowed = {canonicalize_name(name) for name in arguments.allow_upgrade.replace(",", " ").split()}
    install_dependencies([name for name in arguments.extras.split(",") if name], allowed)


if __name__ == "__main__":
    main()
