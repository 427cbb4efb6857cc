"""Start ranks as torchrun does, in processes forked after the imports, which saves each rank seconds of them.

    python -m tests.distributed.forked NUM_RANKS MODULE ARGUMENTS...
    python -m tests.distributed.forked                                  # answers requests, each with a job

A request is a line of JSON: `ranks`, `arguments`, the file of the `output`, and `timeout_s`; its answer is the code.
For tests of what ranks compute; those of how they start and end use torchrun itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

from harness.megatron import prepare_process
from tests.samples.warm_python import end

# What jobs need and import late; the first optimizer imports torch._dynamo, which takes each rank two seconds.
LATE = (
    *("pytest", "torch._dynamo", "harness.recipes.sft", "harness.megatron.run", "harness.megatron.export.folder"),
    # The encoders of media; `transformers` takes three seconds.
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe"),
    "tests.distributed.test_layouts_agree",
)


@cache
def device_of(process: int) -> ProcessGroupGloo.Device:
    """Return the device of gloo's connections in a process."""
    return ProcessGroupGloo.create_default_device()


def share_devices() -> None:
    """Let gloo's groups share a device: each has a thread that wakes a hundred times a second."""
    make = ProcessGroupGloo.__init__

    def make_on_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = self._Options()
        options._devices, options._timeout = [device_of(os.getpid())], timeout
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_on_device  # type: ignore[method-assign]


def jobs_of(listed: str) -> Iterator[list[Any]]:
    """Yield the jobs of a file's list, whose ranks each meet at the port before them, one job after the other."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher's store remembers the job before
    for port, *job in json.loads(Path(listed).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        yield job


def run_module(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.modules.pop(arguments[0], None)  # runpy warns of modules that are imported already
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def become_rank(rank: int, num_ranks: int, ports: int, arguments: list[str]) -> None:
    """Run a module as one rank, once the port of the store has come through the pipe."""
    port = os.read(ports, 16).decode()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 connects to the store, and does not open one
    )
    run_module(arguments)


def run_ranks(num_ranks: int, arguments: list[str]) -> int:
    """Run a module on ranks; end the others when one fails."""
    from torch.distributed import TCPStore

    pipes = [os.pipe() for _ in range(num_ranks)]
    pids = []
    for rank, (ports, _) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, num_ranks, ports, arguments)
            return 0
        pids.append(pid)
    # After the forks: the store has a thread, and a forked process has none but its first.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    for _, writer in pipes:
        os.write(writer, str(store.port).encode())
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if os.waitstatus_to_exitcode(status) != 0 and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return int(failed)


def answer_requests() -> int:
    """Run the jobs of requests, one after another, each in a session of its own. A job returns from here too, once."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if request["ranks"] > 1:
                return run_ranks(request["ranks"], request["arguments"])
            run_module(request["arguments"])
            return 0

        def end(*_: object, session: int = pid) -> None:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)

        signal.signal(signal.SIGALRM, end)
        signal.alarm(request["timeout_s"])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.alarm(0)
        end()
        print(code, file=replies, flush=True)
    return 0


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
    prepare_process()
    for name in LATE:
        importlib.import_module(name)
    share_devices()
    gc.collect()
    gc.freeze()  # collections of the forks leave the pages of this process alone
    if len(sys.argv) == 1:
        return answer_requests()
    return run_ranks(int(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    try:
        end(main())
    except SystemExit as ended:
        end(ended.code)
    except BaseException:
        traceback.print_exc()
        end(1)
