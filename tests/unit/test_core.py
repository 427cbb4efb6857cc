"""Modules that other programs depend on: pure, imported in milliseconds, with numpy and nothing else.

Readers, writers and the loader need the packages of an installation without extras; the public names are documented.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
import typing
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement

import harness

from .test_house import ROOT

CORE = ("errors", "records", "thd", "prep.packing", "schedule", "loader.order", "loader.state")
ALONE = """
import sys, sysconfig
from importlib.abc import MetaPathFinder
sysconfig.get_config_vars()  # of a module with a name of its own

class Only(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy", "harness", *%r}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Only())
"""
# Each in a process that has imported nothing yet.
IMPORT = """
import importlib, os
for module in sys.argv[1:]:
    if (child := os.fork()) == 0:
        importlib.import_module(f"harness.{module}")
        print(module, len([name for name in sys.modules if name.startswith("harness")]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""
USE = """
import numpy as np
from harness.loader.config import LoaderConfig
from harness.loader.order import EpochOrder
from harness.loader.state import LoaderState
from harness.prep.packing import plan_packs
from harness.records import SequenceView
from harness.schedule import schedule
from harness.thd import build_thd_batch

lengths = np.array([9, 5, 7, 3])
print(plan_packs(lengths, pack_size=12).pack_offsets.tolist())
print(schedule("cost_balanced", lengths, dp_size=2, cp_size=1, max_tokens_per_rank=12).num_microbatches)
print(build_thd_batch([SequenceView(np.arange(4, dtype="i4"), np.ones(4, dtype="u1"))]).cu_seqlens.tolist())
print(EpochOrder.__name__, LoaderState(0).packs_consumed, LoaderConfig().seed)
"""
STORE = """
import tempfile
import numpy as np
from harness import Loader, LoaderConfig, Pack, convert_dataset, open_dataset, open_writer, verify_dataset

folder = tempfile.mkdtemp()
fingerprints = set()
for format in ("npy", "parquet", "memmap", "binidx", "jsonl"):
    with open_writer(f"{folder}/{format}", format=format, pack_size=64) as writer:
        for first in range(8):
            writer.append(Pack(np.arange(first, first + 20), [1] * 9 + [0] + [1] * 9 + [0], [0, 10]))
    fingerprints.add(open_dataset(f"{folder}/{format}").fingerprint)
convert_dataset(f"{folder}/jsonl", f"{folder}/virtual", format="virtual")
reader = open_dataset(f"{folder}/virtual")
print(len(fingerprints | {reader.fingerprint}), verify_dataset(f"{folder}/virtual"))
with Loader(reader, LoaderConfig(global_batch_size=4, num_workers=2), num_steps=2) as loader:
    print([len(batch.rows) for batch in loader])
"""
# Packages of an installation without extras, and what they import.
BASE = ("pyarrow", "xxhash", "obstore", "typing_extensions")


def test_a_core_module_imports_numpy_and_no_other_package() -> None:
    command = [sys.executable, "-c", ALONE % ((),) + IMPORT, *CORE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert list(counts) == list(CORE)
    # Time as modules: each takes about two milliseconds.
    assert max(map(int, counts.values())) <= 14, counts


def test_the_core_packs_orders_schedules_and_builds_rows_with_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE % ((),) + USE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[0, 2, 4]", "1", "[0, 3]", "EpochOrder 0 0"], done.stderr


def test_datasets_of_every_format_are_written_read_and_loaded_without_an_extra() -> None:
    program = f"{ALONE % (BASE,)}\nif __name__ == '__main__':\n" + "".join(
        f"    {line}\n" for line in STORE.splitlines()
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["1 []", "[1, 1]"], done.stderr
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(one.partition(">")[0] for one in named) == ["numpy", "obstore", "pyarrow", "xxhash"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("from harness.cli import main; main()", "fix:   pip install 'megatron-sft-harness[cli]'"),
        ("from harness import prepare", "pip install 'megatron-sft-harness[cli]'"),
    ],
)
def test_what_needs_an_extra_names_it(program, expected) -> None:
    command = [sys.executable, "-c", f"{ALONE % (BASE,)}\n{program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].strip() == expected.strip()


def modules_of(extra: str) -> tuple[str, ...]:
    """Return the modules that an installation with one extra gets, from what each package says that it requires."""
    waiting, found = [Requirement(f"megatron-sft-harness[{extra}]")], set()
    while waiting:
        named = waiting.pop()
        found.add(named.name.lower())
        for one in map(Requirement, requires(named.name) or []):
            is_taken = one.marker is None or any(one.marker.evaluate({"extra": each}) for each in ("", *named.extras))
            if is_taken and (one.extras or one.name.lower() not in found):
                waiting.append(one)
    return tuple(name for name, of in packages_distributions().items() if found & {one.lower() for one in of})


def test_the_command_line_needs_its_own_extra_alone_and_a_recipe_names_another() -> None:
    names = sorted(path.stem for path in (ROOT / "harness" / "cli").glob("[a-z]*.py"))
    imports = "".join(f"import harness.cli.{name}\n" for name in names)
    recipe = "import runpy\nrunpy.run_module('harness.recipes.%s', run_name='__main__', alter_sys=True)"
    own = modules_of("cli")
    for allowed, program, extra in (
        (own, imports, ""),
        (BASE, recipe % "prepare", "cli"),
        (own, recipe % "parity", "train"),
    ):
        command = [sys.executable, "-c", f"{ALONE % (allowed,)}{program}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        assert extra in done.stderr.rpartition("pip install ")[2]
        assert done.returncode == (2 if extra else 0)


def test_the_public_names_are_typed_and_described_and_an_example_uses_each() -> None:
    examples = (ROOT / "docs/python.md").read_text()
    assert len(harness.__all__) == 12
    for name in harness.__all__:
        thing = getattr(harness, name)
        assert inspect.getdoc(thing), name
        function = thing.__init__ if inspect.isclass(thing) else thing
        hints = typing.get_type_hints(function, include_extras=True) if name != "HarnessError" else {}
        assert set(inspect.signature(function).parameters) - {"self"} <= set(hints) or name == "HarnessError", name
        assert any(name in block.partition("```")[0] for block in examples.split("```python")[1:]), name
