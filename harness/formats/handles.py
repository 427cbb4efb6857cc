"""Open files of a reader: opened when needed, few at a time, and never shared by two processes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class HandleCache(Generic[T]):
    """At most `capacity` open handles, the longest unused closed first.

    Handles belong to the process that opened them: after a fork the child opens its own, because a file position or
    a lock that two processes share gives each the other's bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._pid = os.getpid()
        self._handles: OrderedDict[int, T] = OrderedDict()
        # The last of them and its key: most reads want the shard that the one before wanted.
        self._newest: tuple[int, T] | None = None

    def get(self, key: int, open_handle: Callable[[int], T]) -> T:
        if self._pid != os.getpid():
            # Dropped, not closed: closing could flush or unlock what is the parent's.
            self._handles, self._newest = OrderedDict(), None
            self._pid = os.getpid()
        newest = self._newest
        if newest is not None and newest[0] == key:
            return newest[1]
        handle = self._handles.get(key)
        if handle is None:
            handle = open_handle(key)
            self._handles[key] = handle
            if len(self._handles) > self._capacity:
                self._handles.popitem(last=False)[1].close()
        else:
            self._handles.move_to_end(key)
        self._newest = (key, handle)
        return handle

    def put(self, key: int, handle: T) -> None:
        """Add a handle that was opened elsewhere in this process."""
        self.get(key, lambda _: handle)

    def close(self) -> None:
        """Close all; a later `get` opens anew."""
        handles, self._handles, self._newest = self._handles, OrderedDict(), None
        if self._pid == os.getpid():
            for handle in handles.values():
                handle.close()

    def __reduce__(self) -> tuple[object, ...]:
        return HandleCache, (self._capacity,)
