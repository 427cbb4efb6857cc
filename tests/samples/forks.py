"""Programs that differ in their arguments alone run in forks of one new process, which imports what all need once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FORKS = """
import json, os, sys
folder, codes = sys.argv[1], []
for number, text in enumerate(sys.argv[2:]):
    if (child := os.fork()) == 0:
        for descriptor, name in ((1, "out"), (2, "error")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = ["harness", *json.loads(text)]
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(*codes)
    sys.exit()
"""


def run_in_forks(
    imports: str, program: str, commands: Sequence[Sequence[object]], *, cwd: Path | None = None, **environment: str
) -> list[tuple[int, str, str]]:
    """Return exit code, standard output and errors of a program for each of these `sys.argv[1:]`.

    Args:
        imports: statements that are run once, before the first fork.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [json.dumps([str(word) for word in command]) for command in commands]
        started = [sys.executable, "-c", f"{imports}\n{_FORKS}\n{program}", folder, *arguments]
        done = subprocess.run(
            started, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
        )
        printed = [[Path(folder, f"{n}.{name}").read_text() for name in ("out", "error")] for n in range(len(commands))]
        return [(int(code), out, error) for code, (out, error) in zip(done.stdout.split(), printed, strict=True)]
