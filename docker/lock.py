"""Write docker/hashes.txt: the SHA-256 of every archive that the image adds to its base, for x86-64 and arm64.

    PYTHON3.12 docker/lock.py      after a change of constraints.txt, with Python and pip of the base's version, and
                                   torch, packaging and wheel, which archives import that the image compiles

Packages that the base brings (PyTorch, Triton, NVIDIA's) are left out. Where the base has other versions than
constraints.txt, docker/install.py takes the hashes of the index instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from install import COMPILED, PROTECTED, hash_of, pin_of, wanted_requirements

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "tokenize", "media", "report", "wandb", "mlflow", "s3", "test", "scan")
PLATFORMS = {
    "x86_64": ("manylinux_2_28", "manylinux_2_27", "manylinux2014"),
    "aarch64": ("manylinux_2_28", "manylinux_2_24", "manylinux2014"),
}


def report(*arguments: str) -> list[dict[str, Any]]:
    """Return what pip would install; exits with its errors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        if subprocess.run([*command, "--report", str(path), *arguments], check=False).returncode:
            sys.exit("lock.py: pip failed, see above")
        return list(json.loads(path.read_text())["install"])


def main() -> None:
    versions = dict(
        line.split("=", 1) for line in (ROOT / "docker" / "versions.env").read_text().splitlines() if "=" in line
    )
    if versions["BASE_PYTHON"] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        sys.exit(f"lock.py: the base has Python {versions['BASE_PYTHON']}, this is {sys.version.split()[0]}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [str(need) for need in wanted_requirements(project, EXTRAS) if not need.name.startswith(PROTECTED)]
    needs = [need for need in wanted if need.partition("==")[0] not in COMPILED]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    entries = [entry for entry in report(*pins, *needs) if not pin_of(entry).startswith(PROTECTED)]
    known: dict[str, set[str]] = {pin_of(entry): {hash_of(entry)} for entry in entries}
    for machine, tags in PLATFORMS.items():
        platforms = [f"--platform={tag}_{machine}" for tag in tags]
        # pip takes sources for another machine only without dependencies, and all of them are listed.
        for entry in report("--no-deps", "--target=/nowhere", *platforms, *known):
            known[pin_of(entry)].add(hash_of(entry))
    sources = [need for need in wanted if need not in needs]
    # Their setup.py, which pip asks for the name and the version, would look for nvcc.
    os.environ |= {name.replace("FORCE_BUILD", "SKIP_CUDA_BUILD"): "TRUE" for name in COMPILED.values()}
    compiled = report("--no-deps", "--no-build-isolation", f"--no-binary={','.join(COMPILED)}", *sources)
    known |= {pin_of(entry): {hash_of(entry)} for entry in compiled}
    lines = [f"{pin} {' '.join(f'--hash=sha256:{one}' for one in sorted(known[pin]))}" for pin in sorted(known)]
    header = "# Written by docker/lock.py: archives of the image, for x86-64 and arm64."
    (ROOT / "docker" / "hashes.txt").write_text("\n".join([header, *lines]) + "\n")
    print(f"{len(known)} packages, {sum(map(len, known.values()))} archives")


if __name__ == "__main__":
    main()
