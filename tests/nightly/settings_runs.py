"""Run recipes with settings, each in a forked child of one process that has imported everything.

    python settings_runs.py CASES RESULTS

CASES is a JSON list of `{"recipe", "overrides"}`; RESULTS gets a line of JSON for each as it ends: its place in the
list, exit code, output, and whether it had to be stopped (SIGTERM after PATIENCE_S) or killed (it did not leave).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.megatron import prepare_process

prepare_process()

import harness.megatron.run  # noqa: E402, F401  imported once, before the forks
from harness.config import compose_config  # noqa: E402
from harness.errors import exit_on_error  # noqa: E402
from harness.plan import PretrainConfig, SftConfig  # noqa: E402
from harness.prep import PrepareConfig  # noqa: E402

SCHEMAS: dict[str, type[Any]] = {"prepare": PrepareConfig, "sft": SftConfig, "pretrain": PretrainConfig}
SIDE_BY_SIDE = 2
PATIENCE_S, GRACE_S = 240, 60
# A setting that asks for more must be refused by name, and must not take the machine with it.
MOST_MEMORY = 12 << 30


@dataclass
class Child:
    place: int
    output: Path
    deadline: float
    ended: str = ""


def run_case(recipe: str, overrides: list[str], output: Path) -> None:
    """Carry out a recipe in this process, and end it with the recipe's exit code."""
    os.setsid()
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code: int | str | None = 99
    try:
        with exit_on_error():
            main = importlib.import_module(f"harness.recipes.{recipe}").main
            code = getattr(main, "__wrapped__", main)(compose_config(recipe, SCHEMAS[recipe], overrides))
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def run_all(cases: list[dict[str, Any]], results: Path) -> None:
    children: dict[int, Child] = {}
    waiting = list(enumerate(cases))
    with results.open("w") as file:
        while waiting or children:
            while waiting and len(children) < SIDE_BY_SIDE:
                place, case = waiting.pop(0)
                output = results.with_name(f"output-{place}.txt")
                if (pid := os.fork()) == 0:
                    run_case(case["recipe"], case["overrides"], output)
                children[pid] = Child(place, output, time.monotonic() + PATIENCE_S)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if child := children.pop(pid, None):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # workers that stayed
                text = child.output.read_text(errors="replace") if child.output.exists() else ""
                child.output.unlink(missing_ok=True)
                code = os.waitstatus_to_exitcode(status)
                file.write(
                    json.dumps({"place": child.place, "code": code, "ended": child.ended, "output": text}) + "\n"
                )
                file.flush()
            for pid, child in children.items():
                if time.monotonic() > child.deadline:
                    os.kill(pid, signal.SIGKILL if child.ended else signal.SIGTERM)
                    child.ended = "killed" if child.ended else "stopped"
                    child.deadline = time.monotonic() + GRACE_S
            time.sleep(0.02)


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
