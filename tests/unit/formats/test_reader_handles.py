"""Open files of a reader: few, and separate for each process."""

from __future__ import annotations

import os

from harness.formats.reader import HandleCache


class Handle:
    def __init__(self, key: int) -> None:
        self.key = key
        self.pid = os.getpid()
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_least_recently_used_handle_is_closed_first() -> None:
    cache: HandleCache[Handle] = HandleCache(2)
    first, second = cache.get(1, Handle), cache.get(2, Handle)
    assert cache.get(1, Handle) is first
    cache.get(3, Handle)
    assert (first.closed, second.closed) == (False, True)
    cache.close()
    assert first.closed
    assert cache.get(1, Handle) is not first


def test_a_forked_child_opens_its_own_handles_and_leaves_the_parents_alone() -> None:
    cache: HandleCache[Handle] = HandleCache(2)
    mine = cache.get(1, Handle)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            theirs = cache.get(1, Handle)
            code = 0 if theirs.pid == os.getpid() and theirs is not mine and not mine.closed else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.get(1, Handle) is mine
