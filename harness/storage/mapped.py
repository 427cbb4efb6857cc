"""Name the mapped file behind a SIGBUS: the system's only report of a mapped page that cannot be read."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from harness.errors import FormatError

# From <signal.h>: SA_SIGINFO | SA_RESETHAND, and where siginfo_t has the address on 64-bit systems.
_FLAGS, _ADDRESS = 0x4 | 0x80000000, 16


class _Action(ctypes.Structure):
    """The libc's `struct sigaction`."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def name_bus_errors(*, dies: bool = False) -> None:
    """Print a named error when this process reads a mapped page that is no longer there, and end it with exit code 2.

    Another process cut the file short while it was mapped, or the disk failed: the system then sends SIGBUS, which ends
    a process without a word. Call it once in the main thread of a command; it does nothing except on 64-bit Linux. With
    `dies` it ends by the signal, for a worker whose parent reports how it ended.
    """
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return
    action = _Action(handler=ctypes.cast(_handler(dies), ctypes.c_void_p), flags=_FLAGS)
    ctypes.CDLL(None).sigaction(int(signal.SIGBUS), ctypes.byref(action), None)


@functools.cache  # also so that it lives as long as the process
def _handler(dies: bool) -> Any:
    # Called by C in the middle of the read that failed. That may run Python, unlike for signals that come at any time:
    # such a read is a plain copy, which holds no lock. A handler of `signal` would only run after it, which is never.
    def explain(_number: int, info: int, _context: int) -> None:
        try:
            error = bus_error_at(ctypes.c_uint64.from_address(info + _ADDRESS).value)
            os.write(2, f"FormatError: {error}\n".encode(errors="replace"))
        finally:
            if not dies:
                os._exit(2)  # nothing can be raised from here

    return ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(explain)


def bus_error_at(address: int) -> FormatError:
    """Return the error for a page at an address of this process that cannot be read."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if not (begin <= address < end and name):
            continue
        if name[0].startswith("/dev/shm/"):
            what = "a page of shared memory cannot be used: /dev/shm is full, or another process removed the file"
            return FormatError(what, where=name[0], fix="free space in /dev/shm; for a container, increase --shm-size")
        missing = f"byte {int(offset, 16) + address - begin:,} is missing"
        what = f"the file was truncated or removed, or its disk failed, while it was read: {missing}"
        fix = "copy the file again (check its disk: dmesg), and run `harness verify` and then the same command again"
        return FormatError(what, where=name[0], fix=fix)
    where = f"address {address:#x} of process {os.getpid()}"
    return FormatError("a memory page cannot be read", where=where, fix="see dmesg")
