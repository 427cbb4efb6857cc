"""Give tests a `python` whose programs begin with packages imported: each is a fork of one process that imported them.

    subprocess.run([warm_python(), "-m", "harness.recipes.sft", ...])

A program has the arguments, variables, folder and open files of its command, and imports this project anew. It is
killed once its command is, and the modules that it runs as processes of its own (`sys.executable -m`) begin alike. For
tests of what programs do; those of how the interpreter starts them, of signals, and of variables that packages read on
import (HF_HOME) use the usual one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

# What commands, their runs and `plain_trainer` import of other projects, which takes longer than they.
IMPORTS = (
    *("multiprocessing.resource_tracker", "multiprocessing.spawn"),  # which keep the usual interpreter
    *("hydra", "pyarrow.parquet", "typer", "torch._dynamo", "torch.distributed.run", "torch.utils.tensorboard"),
    *("megatron.core.models.gpt", "megatron.core.dist_checkpointing", "transformers.models.auto.tokenization_auto"),
    *(f"transformers.models.{name}" for name in ("llama.modeling_llama", "mixtral.modeling_mixtral")),
)
ROOT = Path(__file__).resolve().parents[2]
_SERVERS: list[subprocess.Popen[bytes]] = []  # kept, and not waited for: other workers may need it longer
_CLIENT = """#!{python} -IS
import json, os, socket, sys
arguments = {before!r} + sys.argv[1:]
if {runs_modules!r} and arguments[arguments[:1] == ["-u"] :][:1] != ["-m"]:
    os.execv({python!r}, [{python!r}, *arguments])
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({place!r})
    request = json.dumps([arguments, dict(os.environ), os.getcwd(), files]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
    server.sendall(request)
    code = int(server.recv(16) or -9)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def warm_python() -> str:
    """Return an executable that runs programs in forks of a process with IMPORTS; beside it `harness` and `torchrun`.

    All workers of pytest share the process, which ends with the last of them.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")[:8]
    folder = Path(tempfile.gettempdir()) / f"warm-{os.getuid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            # It is open until this process ends; there is no reader before the first worker, nor after the last.
            os.open(folder / "users", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            _start(folder)
    return str(folder / "python")


def _start(folder: Path) -> None:
    """Start the process, and write the executables into its folder."""
    modules = {"python": [], "python3": [], "harness": ["-m", "harness"], "torchrun": ["-m", "torch.distributed.run"]}
    for name, before in modules.items():
        client, settings = folder / name, {"python": sys.executable, "place": str(folder / "socket")}
        client.write_text(_CLIENT.format(before=before, runs_modules=name == "python3", **settings))
        client.chmod(0o700)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (folder / "users").unlink(missing_ok=True)
    os.mkfifo(folder / "users")
    reader = os.open(folder / "users", os.O_RDONLY | os.O_NONBLOCK)
    os.open(folder / "users", os.O_WRONLY)
    command = [sys.executable, __file__, str(folder / "socket")]
    server = subprocess.Popen(command, env=environment, stdin=reader, stdout=subprocess.PIPE)
    os.close(reader)
    assert server.stdout.read(1) == b"."
    _SERVERS.append(server)


def run(arguments: list[str]) -> object:
    """Run a program as Python runs these arguments; return what it ends with."""
    while arguments[0] in ("-u", "-W"):
        arguments = arguments[1 + (arguments[0] == "-W") :]
    try:
        if arguments[0] in ("-m", "-c"):
            sys.path.insert(0, "")
            sys.argv = [arguments[0], *arguments[2:]]
        if arguments[0] == "-m":
            sys.argv[0] = arguments[1]
            # runpy warns of modules that are imported already.
            if not hasattr(sys.modules.get(arguments[1]), "__path__"):
                sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def become(request: list[Any], files: list[int]) -> NoReturn:
    """Become the program of a request."""
    arguments, variables, folder, numbers = request
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # away from the numbers that they get
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [place for place in variables.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    end(run(arguments))


def end(code: Any) -> NoReturn:
    """End as the interpreter does, but without taking all modules apart, which costs more than most programs."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    code = code if isinstance(code, int) else int(code is not None)
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {error}", file=sys.stderr)
        code = 120
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def answer(connection: socket.socket) -> None:
    """Run a program for a connection, and send its exit code; kill it once the other end is closed."""
    size, files, _, _ = socket.recv_fds(connection, 8, 64)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(size, "big")))
    if (child := os.fork()) == 0:
        connection.close()
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, where a signal to the tests ends the parent
        become(request, files)
    for file in files:
        os.close(file)

    def watch() -> None:
        if not connection.recv(1):
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        connection.sendall(str(code).encode())
    os._exit(0)


def main() -> None:
    sys.path.pop(0)  # programs have a folder of their own there
    from harness.megatron import prepare_process

    prepare_process()
    for name in IMPORTS:
        with suppress(ImportError):  # an environment of other versions has fewer
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        del sys.modules[name]
    sys.executable = str(Path(sys.argv[1]).with_name("python3"))
    gc.freeze()  # so that collections of the forks leave the pages of this process alone
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        os.write(1, b".")
        while select.select([listener, 0], [], [])[0] == [listener]:  # until standard input ends, which workers hold
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    shutil.rmtree(Path(sys.argv[1]).parent)


if __name__ == "__main__":
    main()
