"""Run commands in forks of a process that has imported everything: a command starts in milliseconds, as a real process.

Reads a request a line, and answers with the wait statuses of its commands. They run side by side, each in a session of
its own; if the first is one that stops, the others run while it is stopped, and it is continued after them. In the end,
or after `patience_s`, or `grace_s` after a signal ended one, whatever is left of their sessions is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from warm_python import end, run

# What commands import late, and training runs too: it takes longer than they.
LATE = (
    *("harness.prep.preview", "harness.recipes.prepare", "transformers.models.auto.tokenization_auto"),
    *("transformers.tokenization_python", "transformers.tokenization_utils_tokenizers"),
)
LATE_IN_TRAINING = (
    *("matplotlib.axes", "matplotlib.backends.backend_agg", "tensorboard.compat.proto.event_pb2"),
    *("tensorboard.summary.writer.record_writer", "torch._dynamo"),
)


def start(request: dict[str, Any], number: int) -> int:
    child = os.fork()
    if child:
        return child
    command = request["commands"][number]
    os.setsid()
    for descriptor, name in ((0, os.devnull), (1, command["output"] + ".out"), (2, command["output"] + ".err")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.update(command["environment"])
    if command["counted"]:
        os.environ["COUNTED_CALLS"] = request["state"]  # for the processes that it starts
        ctypes.CDLL(None).counted_calls_attach(request["state"].encode())
    os.umask(command["umask"])
    if command["uid"]:
        os.setgroups([])
        os.setgid(command["uid"])
        os.setuid(command["uid"])
    end(run(["-m", *command["arguments"]]))


def answer(request: dict[str, Any]) -> list[int | None]:
    until = time.monotonic() + request["patience_s"]
    statuses: dict[int, int] = {}
    first = start(request, 0)
    if request["stops"]:
        _, status = os.waitpid(first, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return [status]
    children = [first, *(start(request, number) for number in range(1, len(request["commands"])))]
    if request["stops"]:
        wait(children[1:], statuses, until, request["grace_s"])
        os.kill(first, signal.SIGCONT)
    wait(children, statuses, until, request["grace_s"])
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if child not in statuses:
            os.waitpid(child, 0)
    return [statuses.get(child) for child in children]


def wait(children: list[int], statuses: dict[int, int], until: float, grace_s: float) -> None:
    while not statuses.keys() >= set(children) and time.monotonic() < until:
        for child in children:
            if child not in statuses:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = status
                if ended and os.WIFSIGNALED(status):
                    until = min(until, time.monotonic() + grace_s)
        time.sleep(0.002)


def main() -> None:
    from harness.cli.app import COMMANDS

    for module, _ in COMMANDS.values():
        importlib.import_module(f"harness.cli.{module}")
    import harness.formats
    import harness.indexed.token_shards
    import harness.loader.live
    from harness.config import compose_config
    from harness.prep import PrepareConfig
    from harness.prep.pipeline import repack_store  # noqa: F401 - other users cannot import from this one's Python

    compose_config("prepare", PrepareConfig, [])
    for name in LATE:
        importlib.import_module(name)
    for name in harness.formats.FORMATS:
        harness.formats.load_format(name)
    with suppress(ImportError):
        import pandas  # noqa: F401 - by pyarrow, as soon as it makes numbers of a column
    if "training" in sys.argv[1:]:
        from harness.megatron import prepare_process

        prepare_process()

        import harness.recipes.sft

        import harness.megatron.export
        import harness.megatron.run
        from harness.plan.settings import SftConfig

        for name in LATE_IN_TRAINING:
            importlib.import_module(name)
        compose_config("sft", SftConfig, [])
    # Commands take the place of standard input.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run(["-m", "harness", "verify", os.devnull])  # imports what a command imports late
    gc.freeze()  # so that collections of the forks leave the pages of this process alone
    print("ready", file=replies, flush=True)
    for line in requests:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
