"""Size and shape of the code: `python tests/shape.py` prints it, `--table` writes it to the table that tests hold.

Numbers may fall and never rise without a line in the same commit that says what was deleted for it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "tests/unit/test_house.py"
MOST_LINES, MOST_COMPLEXITY = 60, 15
FOLDERS = ("configs", "docker", "docs", "harness", "recipes", "slurm", "tests")
# Written by programs.
GENERATED = ("!BENCHMARKS.md",)
# Files that make a CPU stand in for a GPU, or one process for many.
IMPORTED = """
import contextlib, io, os, sys
from harness.cli import main
sys.argv = ["harness", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
for name, module in sys.modules.items():
    if name.startswith("harness"):
        print(os.path.relpath(module.__file__))
"""
STAND_INS = {"harness/megatron/compat.py", "harness/megatron/__init__.py", "harness/megatron/job/runtime.py"}
# What one has to know to change how packs become an optimizer's step.
CORE = (
    *("harness/errors.py", "harness/records.py", "harness/checks.py", "harness/settings.py", "harness/thd.py"),
    *("harness/schedule/*.py", "harness/loader/*.py", "!harness/loader/corpus.py"),
    *(
        f"harness/formats/{name}.py"
        for name in (
            "base",
            "reader",
            "writer",
            "opening",
            "manifest",
            "index",
            "layouts/memmap",
            "verify",
            "layouts/parquet*",
        )
    ),
    *("harness/formats/layouts/parquet*.py", "harness/storage/*.py"),
    *(f"!harness/storage/{name}.py" for name in ("bucket", "claims", "connections", "ranges")),
    "!harness/storage/local_copies.py",
    *("harness/prep/chat/**/*.py", "harness/prep/tokenize/*.py", "harness/prep/packing.py", "harness/prep/pipeline.py"),
    *(f"harness/train/{name}.py" for name in ("loop", "folder", "checkpoints", "metrics")),
    *(f"harness/megatron/{name}.py" for name in ("step", "batch", "model/gpt", "model/attention", "job/runtime")),
    *("harness/megatron/run/training.py", "harness/megatron/state/checkpoint.py"),
    *("harness/plan/settings.py", "harness/plan/model.py", "harness/plan/layout.py"),
)
# What one reads to follow packs to the optimizer's step.
PATH = (
    *("recipes/sft.py", "harness/records.py", "harness/thd.py", "harness/schedule/*.py", "harness/train/loop.py"),
    *(f"harness/loader/{name}.py" for name in ("order", "config", "plan", "loader", "state")),
    *(f"harness/megatron/{name}.py" for name in ("data/feed", "batch", "step", "run/training", "run/fine_tuning")),
)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a file, itself first."""
    return list(ast.walk(ast.parse(path.read_text())))


def files_of(*patterns: str) -> list[Path]:
    """Return the files that match, without those of patterns with an exclamation mark."""
    found = {path for pattern in patterns if pattern[0] != "!" for path in ROOT.glob(pattern)}
    return sorted(found - {ROOT / pattern[1:] for pattern in patterns if pattern[0] == "!"})


def count_lines(*patterns: str) -> int:
    return sum(path.read_text().count("\n") for path in files_of(*patterns))


def count_complex() -> int:
    """Return the functions that ruff finds too complex."""
    command = [sys.executable, "-m", "ruff", "check", "harness", "recipes", "--select=C901", "--output-format=json"]
    command += ["--no-cache", f"--config=lint.mccabe.max-complexity={MOST_COMPLEXITY}"]
    return len(json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout))


def count_printed(*arguments: str) -> int:
    """Return the lines that a Python program prints on the files of the project."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return len([line for line in done.stdout.splitlines() if line.startswith(("harness/", "recipes/"))])


def measure_lines() -> dict[str, int]:
    """Return the lines of each package of `harness`, of its own modules, of recipes, tests and benches."""
    packages = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("harness/*/__init__.py"))
    lines = {"harness": count_lines("harness/*.py")}
    lines |= {package: count_lines(f"{package}/**/*.py") for package in packages}
    benchmarks = count_lines("tests/benchmarks/*.py")
    tests = count_lines("tests/**/*.py") - benchmarks
    return lines | {"recipes": count_lines("recipes/**/*.py"), "tests": tests, "tests/benchmarks": benchmarks}


def measure_shape() -> dict[str, int]:
    """Return counts of what makes code hard to carry, by name."""
    modules = files_of("harness/**/*.py", "recipes/**/*.py")
    nodes = [node for path in modules for node in nodes_of(path)]
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    doors = [node for path in modules if "__all__" in path.read_text() for node in nodes_of(path)]
    exported = [node.value for node in doors if isinstance(node, ast.Assign) and "__all__" in ast.dump(node)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    pages = files_of("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS), *GENERATED)
    return {
        "core ring, lines": count_lines(*CORE),
        "from packs to the optimizer's step, lines": count_lines(*PATH),
        "own frames from the command to the model": count_printed("-m", "tests.samples.frames"),
        "modules that `harness --help` imports": count_printed("-c", IMPORTED),
        f"functions over {MOST_LINES} lines": sum(
            (node.end_lineno or 0) - node.lineno >= MOST_LINES for node in functions
        ),
        f"functions of complexity over {MOST_COMPLEXITY}": count_complex(),
        "names in __all__": sum(isinstance(node, ast.Constant) for value in exported for node in ast.walk(value)),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "mock.patch outside the CPU stand-in": sum(
            path.read_text().count("mock.patch")
            for path in modules
            if path.relative_to(ROOT).as_posix() not in STAND_INS
        ),
        "Markdown by hand, kB": sum(len(path.read_bytes()) for path in pages) // 1000,
    }


def write_table(lines: dict[str, int], shape: dict[str, int]) -> None:
    """Replace the two tables of the test by these numbers."""
    text = HOUSE.read_text()
    for name, table in (("LINES", lines), ("SHAPE", shape)):
        rows = "".join(f'    "{key}": {value:_},\n' for key, value in table.items())
        text = re.sub(rf"^{name} = {{\n.*?^}}\n", f"{name} = {{\n{rows}}}\n", text, flags=re.MULTILINE | re.DOTALL)
    HOUSE.write_text(text)


if __name__ == "__main__":
    measured_lines, measured_shape = measure_lines(), measure_shape()
    total = sum(count for name, count in measured_lines.items() if not name.startswith("tests"))
    for key, value in {**measured_lines, "harness + recipes": total, **measured_shape}.items():
        print(f"{value:8,}  {key}")
    if "--table" in sys.argv:
        write_table(measured_lines, measured_shape)
