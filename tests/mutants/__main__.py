"""`python -m tests.mutants [MODULE]... [count=N] [seed=S] [function=F]`: change modules; their tests must fail.

mutmut writes the mutants, all into one copy of the module. pytest collects the tests of the module once, and each
mutant is tried in a fork of that process, first by the tests that call its function and killed most. Mutants that no
test can kill are in `equal.json`, with the reason. Changes of the wording of errors and logs are no mutants.
"""

from __future__ import annotations

import ast
import gc
import json
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EQUAL = Path(__file__).with_name("equal.json")
# The modules that decide what is trained, and the tests that must notice a change of each.
MODULES = {
    "harness/thd.py": ("tests/unit/test_thd.py",),
    "harness/schedule/as_packed.py": ("tests/unit/schedule/test_as_packed.py",),
    "harness/schedule/dp_balanced.py": (
        "tests/unit/schedule/test_dp_balanced.py",
        "tests/unit/schedule/test_schedulers.py",
    ),
    "harness/schedule/cost_balanced.py": (
        "tests/unit/schedule/test_cost_balanced.py",
        "tests/unit/schedule/test_schedulers.py",
    ),
    "harness/schedule/dynamic_context.py": (
        "tests/unit/schedule/test_dynamic_context.py",
        "tests/unit/schedule/test_schedulers.py",
    ),
    "harness/schedule/batch.py": ("tests/unit/schedule/test_schedulers.py",),
    "harness/formats/layouts/parquet_packs.py": ("tests/unit/formats/test_parquet_format.py",),
    "harness/loader/order.py": ("tests/unit/loader/test_loader_order.py",),
    "harness/loader/state.py": ("tests/unit/loader/test_loader_state.py",),
    "harness/loader/plan.py": ("tests/unit/loader/test_loader_step.py", "tests/unit/loader/test_loader_blend.py"),
    "harness/prep/packing.py": ("tests/unit/prep/test_packing.py", "tests/unit/prep/test_stream_packing.py"),
    "harness/prep/tokenize/masks.py": (
        "tests/unit/prep/test_masker.py",
        "tests/unit/prep/test_masks.py",
        "tests/unit/prep/test_end_tokens.py",
    ),
    "harness/megatron/batch.py": ("tests/unit/megatron/test_batch.py",),
    "harness/loader/blend.py": (
        "tests/unit/loader/test_loader_blend.py",
        "tests/unit/loader/test_loader_datasets.py",
        "tests/unit/loader/test_loader_step.py",
    ),
    "harness/loader/live/balance.py": ("tests/unit/loader/test_live_balance.py",),
    "harness/loader/live/position.py": ("tests/unit/loader/test_live_position.py",),
    "harness/megatron/model/router.py": ("tests/unit/megatron/test_router.py", "tests/unit/megatron/test_mtp.py"),
    "harness/megatron/model/mtp.py": ("tests/unit/megatron/test_mtp.py",),
    "harness/prep/tokenize/offsets.py": ("tests/unit/prep/test_tokenize.py", "tests/unit/prep/test_masks.py"),
    "harness/prep/fitting.py": ("tests/unit/prep/test_fitting.py",),
    "harness/formats/index.py": ("tests/unit/formats/test_index.py",),
    "harness/train/loop.py": ("tests/unit/train/test_loop.py",),
    "harness/train/lines.py": ("tests/unit/train/test_lines.py",),
}
_WORDS = ("what", "where", "fix", "detail")  # variables with parts of an error
_PLUGINS = ("no:xdist", "no:timeout", "no:cacheprovider", "tests.mutants.plain_examples")
_OPTIONS = ["-q", *(f"-p{name}" for name in _PLUGINS), "-Wignore", "--tb=native"]


@dataclass(frozen=True)
class Mutant:
    """A changed function: its name in the module, and the lines that differ."""

    name: str
    function: str
    diff: tuple[str, ...]

    def as_entry(self, module: str) -> dict[str, Any]:
        return {"module": module, "function": self.function, "diff": list(self.diff)}


@dataclass
class Outcome:
    """Mutants of a module by their end."""

    killed: list[Mutant] = field(default_factory=list)
    timeout: list[Mutant] = field(default_factory=list)
    equal: list[Mutant] = field(default_factory=list)
    survived: list[Mutant] = field(default_factory=list)


class _Wordless(ast.NodeTransformer):
    """Removes what people read: the texts of errors, and those of logs. The class and reason of an error stay."""

    def visit_Call(self, call: ast.Call) -> ast.AST:
        name = ast.unparse(call.func)
        if name.endswith(("Error", "os_errors_as")):
            kinds = ("BadReason.", "HarnessError", "FormatError")
            return ast.Call(call.func, [one for one in call.args if ast.unparse(one).startswith(kinds)], [])
        return ast.Constant(None) if name.endswith(("hooks.log", "hooks.at")) else self.generic_visit(call)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.Pass() if ast.unparse(node.targets[0]) in _WORDS else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return ast.Pass() if ast.unparse(node.target) in _WORDS else self.generic_visit(node)


def _without_words(function: str) -> str:
    named = textwrap.dedent(function).replace("def (", "def one(", 1)
    return ast.dump(_Wordless().visit(ast.parse(named)))


def write_mutants(tree: Path, module: str) -> list[Mutant]:
    """Replace a module in a copy of the tree by one with all its mutants; return these."""
    from mutmut.mutation.file_mutation import mutate_file_contents  # reads the pyproject.toml of the current folder

    path = tree / module
    mutated = mutate_file_contents(module, path.read_text())
    path.write_text(mutated.code)
    lines = mutated.code.splitlines()

    def text_of(name: str) -> list[str]:
        span = mutated.line_span_by_function_name[name]
        return [line.replace(name, "") for line in lines[span.start - 1 : span.end]]

    mutants = []
    for name in mutated.mutant_names:
        name = name.rpartition(".")[2]
        function = name.partition("__mutmut_")[0]
        original, mutant = text_of(f"{function}__mutmut_orig"), text_of(name)
        if _without_words("\n".join(original)) == _without_words("\n".join(mutant)):
            continue
        diff = ndiff(original, mutant)
        changed = tuple(" ".join(line.split()) for line in diff if line[0] in "+-")
        mutants.append(Mutant(name, function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", "."), changed))
    return mutants


class Trial:
    """A pytest plugin that runs collected tests on one mutant after the other, each in a fork."""

    def __init__(self, module: str, mutants: Sequence[Mutant], equal: Sequence[Any]) -> None:
        self._module = module.removesuffix(".py").replace("/", ".")
        self._entry_of = lambda mutant: mutant.as_entry(module)
        self._mutants, self._equal = mutants, equal
        self._cpu_s: Counter[pytest.Item] = Counter()
        self._kills: Counter[pytest.Item | tuple[str, pytest.Item]] = Counter()
        self.outcome = Outcome()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from mutmut.mutation.trampoline import set_mutant_under_test

        _render_here()
        callers = self._find_tests(session)
        gc.freeze()  # a collection in a fork would copy the pages of all that is here
        reached = mmap.mmap(-1, 4)  # shared with the forks: exit codes end at 255
        for mutant in self._mutants:
            if self._entry_of(mutant) in self._equal:
                self.outcome.equal.append(mutant)
                continue
            # What others use may have been made by this function in a fixture.
            own = callers.get(mutant.name.partition("__mutmut_")[0], set())
            tests = sorted(session.items, key=lambda test: self._rank(mutant, test, test in own))
            if (child := os.fork()) == 0:
                set_mutant_under_test(f"{self._module}.{mutant.name}")
                for place, test in enumerate(tests):
                    reached[:] = place.to_bytes(4, "big")
                    _limit_cpu(20 * self._cpu_s[test] + 5)
                    if not _passes(test, tests[place + 1] if place + 1 < len(tests) else None):
                        os._exit(1)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                killer = tests[int.from_bytes(reached[:], "big")]
                self._kills.update([killer, (mutant.function, killer)])
            ends = self.outcome.timeout if code < 0 else self.outcome.killed if code else self.outcome.survived
            ends.append(mutant)
            if ends is self.outcome.survived:
                print(f"survived: {mutant.function}", *mutant.diff, sep="\n    ", file=sys.__stderr__, flush=True)
        return True

    def _rank(self, mutant: Mutant, test: pytest.Item, calls_it: bool) -> tuple[float, ...]:
        return not calls_it, -self._kills[mutant.function, test], -self._kills[test], self._cpu_s[test]

    def _find_tests(self, session: pytest.Session) -> dict[str, set[pytest.Item]]:
        """Run the tests on the module as it is; return by function those that call it."""
        from mutmut.mutation.trampoline import set_mutant_under_test
        from mutmut.state import state

        set_mutant_under_test("stats")
        tests: dict[str, set[pytest.Item]] = {}
        for place, test in enumerate(session.items):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            following = session.items[place + 1] if place + 1 < len(session.items) else None
            if not _passes(test, following):
                raise pytest.UsageError(f"{test.nodeid} fails without a mutant")
            self._cpu_s[test] = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
            for name in state()._stats:
                tests.setdefault(name.rpartition(".")[2], set()).add(test)
            state()._stats.clear()
        return tests


def _passes(test: pytest.Item, following: pytest.Item | None = None) -> bool:
    from _pytest.runner import runtestprotocol

    return not any(report.failed for report in runtestprotocol(test, log=False, nextitem=following))


def _limit_cpu(seconds: float) -> None:
    """End this process after some more processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds), hard))


def _render_here() -> None:
    """Render chats in this process and its forks: the process beside each would start anew for every mutant."""
    from harness.prep.tokenize import renderer

    class Here:
        lock, has_ended = threading.Lock(), False

        def exchange(self, request: bytes) -> Any:
            settings, name, *arguments = pickle.loads(request)
            if (pid := os.getpid()) != self.pid:  # what the parent has made is of no mutant
                renderer._made.cache_clear()
                self.pid = pid
            try:
                return json.loads(json.dumps(renderer._answer(settings, name, arguments, renderer.CPU_S)))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)

        pid = os.getpid()

    here = Here()
    renderer._process_of = lambda *_: here


def listed() -> list[dict[str, Any]]:
    """Return the mutants of `equal.json`."""
    return json.loads(EQUAL.read_text())


def try_mutants(module: str, count: int | None = None, seed: str = "", function: str = "") -> Outcome:
    """Try all mutants of a module or of a function, or `count` of them, in a copy of the tree: the current folder."""
    mutants = [mutant for mutant in write_mutants(Path.cwd(), module) if function in ("", mutant.function)]
    if count is not None and count < len(mutants):
        mutants = random.Random(seed).sample(mutants, count)
    equal = [{name: entry[name] for name in ("module", "function", "diff")} for entry in listed()]
    trial = Trial(module, mutants, equal)
    options = ["-o", "addopts=--import-mode=importlib -m 'not nightly'"]
    code = pytest.main([*_OPTIONS, *options, *MODULES[module]], plugins=[trial])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{module}: its tests cannot be run")
    return trial.outcome


def copy_tree(target: Path) -> None:
    """Copy the files of the tree that git has, or would take."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def try_in_a_copy(module: str, count: int | None, seed: str, function: str = "") -> dict[str, int]:
    """Try mutants of a module in a copy of the tree, in a process of its own; return their number by end."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        command = [sys.executable, "-m", "tests.mutants", f"_only={module}", f"count={count or ''}"]
        command += [f"seed={seed}", f"function={function}"]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    options = dict(argument.split("=") for argument in arguments if "=" in argument)
    count, seed = int(options.get("count") or 0) or None, options.get("seed", "")
    function = options.get("function", "")
    if "_only" in options:  # in the copy
        outcome = try_mutants(options["_only"], count, seed, function)
        print(json.dumps({name: len(mutants) for name, mutants in vars(outcome).items()}), file=sys.__stdout__)
        return
    for module in [argument for argument in arguments if "=" not in argument] or MODULES:
        counts = try_in_a_copy(module, count, seed, function)
        print(f"{module}: {', '.join(f'{number} {name}' for name, number in counts.items())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
