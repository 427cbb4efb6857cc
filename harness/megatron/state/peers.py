"""Copies of a node's files on the disk of another node, over connections of their own, beside the training.

Every rank listens at one port. To make a copy, a rank connects to one rank of the next node and sends its files in the
order that both know; the receiver takes their hashes and gives a file its name once they are right. A connection that
ends early is the only message of failure. All of it runs in threads that spend their time in the kernel.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import xxhash

from harness.storage import StoredFile

_PIECE_BYTES = 1 << 22
_GREETING = struct.Struct("!32sIQ")
# A connection whose greeting is not whole after so long is closed, and so is the oldest of more than so many.
_GREETING_S, _MOST_GREETINGS = 10.0, 256
# The longest wait until a thread notices that the job ends.
_POLL_S = 1.0


def receiver_of(rank: int, disks: Sequence[Sequence[int]]) -> int | None:
    """Return the rank on the next disk that keeps the copies of a rank's files; None if there is one disk."""
    if len(disks) < 2:
        return None
    own = next(number for number, ranks in enumerate(disks) if rank in ranks)
    ranks = disks[(own + 1) % len(disks)]
    return ranks[disks[own].index(rank) % len(ranks)]


def own_address() -> str:
    """Return the address by which this node reaches the first rank, empty without a launcher."""
    return address_towards(os.environ["MASTER_ADDR"]) if "MASTER_ADDR" in os.environ else ""


def address_towards(host: str) -> str:
    """Return the address of this node on the way to another; nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(place)
        return str(asking.getsockname()[0])


class Listener:
    """The port at which a rank takes copies of other nodes' files."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.place: tuple[str, int] = self.socket.getsockname()[:2]

    def close(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a connection
        self.socket.close()


class PeerCopy:
    """The copy of one checkpoint: a thread that sends this rank's files, and one that receives those of its peers.

    Args:
        files: of every rank, in the order in which they are sent.
        receivers: the rank that keeps the copies of each rank's files.
        token: 32 bytes that only the ranks of the job know.
        number: of the copy, which tells it from an abandoned one.
        timeout_s: without a byte ends a connection, and the wait until all senders have connected.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        files: Sequence[Sequence[StoredFile]],
        receivers: Sequence[int],
        *,
        listener: Listener,
        places: Sequence[tuple[str, int]],
        token: bytes,
        number: int,
        timeout_s: float,
    ) -> None:
        self._folder, self._listener = folder, listener
        self._token, self._number, self._timeout_s = token, number, timeout_s
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self.problems: list[str] = []
        to, own = receivers[rank], files[rank]
        senders = {other: files[other] for other, receiver in enumerate(receivers) if receiver == rank and files[other]}
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._send, rank, own, places[to]), daemon=True),
            threading.Thread(target=self._guarded, args=(self._receive, senders), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_done(self) -> bool:
        """True once both threads have ended, with or without problems."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the threads, whatever they wait for."""
        self._is_closed = True
        self._listener.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, BlockingIOError | TimeoutError):
                reason = f"no answer for {self._timeout_s:g} s"
            of = f", {error.filename}" if error.filename else ""
            self.problems.append(f"{socket.gethostname()}: {reason}{of}")
        # A copy without a problem counts as whole.
        except Exception as error:
            self.problems.append(f"{socket.gethostname()}: {type(error).__name__} {error}".rstrip())

    def _send(self, rank: int, files: Sequence[StoredFile], place: tuple[str, int]) -> None:
        if not files:
            return
        try:
            connection = socket.create_connection(place, timeout=self._timeout_s)
        except OSError as error:
            raise OSError(error.errno, f"{place[0]}:{place[1]} cannot be reached: {error.strerror or error}") from None
        with self._used(connection):
            connection.sendall(_GREETING.pack(self._token, rank, self._number))
            for file in files:
                with (self._folder / file.path).open("rb") as source:
                    at = 0
                    while at < file.num_bytes:
                        piece = min(_PIECE_BYTES, file.num_bytes - at)
                        sent = os.sendfile(connection.fileno(), source.fileno(), at, piece)
                        if sent == 0:
                            raise OSError(None, f"{file.path} has {at:,} bytes, expected {file.num_bytes:,}")
                        at += sent
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # returns when the receiver has it all

    def _receive(self, expected: Mapping[int, Sequence[StoredFile]]) -> None:
        threads = []
        for rank, connection in self._greeted(set(expected)):
            work = (self._receive_files, connection, expected[rank], rank)
            threads.append(threading.Thread(target=self._guarded, args=work, daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _greeted(self, waiting: set[int]) -> Iterator[tuple[int, socket.socket]]:
        """Yield rank and connection of each peer once its greeting is whole; the greetings of all are read at once."""
        listener, limit = self._listener.socket, time.monotonic() + self._timeout_s
        listener.setblocking(False)
        greetings: dict[socket.socket, tuple[float, bytearray]] = {}
        try:
            while waiting:
                ready: list[Any] = wait([listener, *greetings], _POLL_S)
                now = time.monotonic()
                if self._is_closed:
                    raise OSError(None, "the job ends")
                if now > limit:
                    raise TimeoutError
                if listener in ready:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    greetings[connection] = now + _GREETING_S, bytearray()
                for connection, (deadline, greeting) in list(greetings.items()):
                    has_ended = connection in ready and not _read_some(connection, greeting)
                    if len(greeting) == _GREETING.size and (rank := self._rank_of(greeting)) in waiting:
                        del greetings[connection]
                        waiting.remove(rank)
                        yield rank, connection
                    elif has_ended or len(greeting) == _GREETING.size or now > deadline:
                        _end(connection)
                        del greetings[connection]
                if len(greetings) > _MOST_GREETINGS:
                    _end(oldest := next(iter(greetings)))
                    del greetings[oldest]
        finally:
            for connection in greetings:
                _end(connection)

    def _rank_of(self, greeting: bytearray) -> int:
        """Return the rank that a greeting is from, -1 for a stranger's and one of an abandoned copy."""
        token, rank, number = _GREETING.unpack(greeting)
        return int(rank) if hmac.compare_digest(token, self._token) and number == self._number else -1

    def _receive_files(self, connection: socket.socket, files: Sequence[StoredFile], rank: int) -> None:
        with self._used(connection):
            buffer = memoryview(bytearray(_PIECE_BYTES))
            for file in files:
                self._receive_file(connection, file, rank, buffer)

    def _receive_file(self, connection: socket.socket, file: StoredFile, rank: int, buffer: memoryview) -> None:
        path = self._folder / file.path
        copying, digest, left = path.with_name(f"{path.name}.copying"), xxhash.xxh3_64(), file.num_bytes
        try:
            with copying.open("wb") as out:
                while left:
                    piece = _read(connection, buffer[: min(left, _PIECE_BYTES)])
                    digest.update(piece)
                    out.write(piece)
                    left -= len(piece)
            if digest.hexdigest() != file.xxh3:
                raise OSError(None, f"rank {rank} sent {file.path} with different content than it wrote")
            copying.rename(path)
        except OSError:
            with suppress(OSError):
                copying.unlink()
            raise

    @contextmanager
    def _used(self, connection: socket.socket) -> Iterator[None]:
        self._connections.add(connection)
        try:
            if self._is_closed:
                raise OSError(None, "the job ends")
            # The kernel's own limits: a read then waits for a whole piece in one call, without Python's lock.
            connection.settimeout(None)
            limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, limit)
            yield
        finally:
            self._connections.discard(connection)
            _end(connection)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # closing leaves it open in processes forked meanwhile
    connection.close()


def _read_some(connection: socket.socket, greeting: bytearray) -> bool:
    """Add what has arrived of a greeting; return False if the connection ended."""
    try:
        found = connection.recv(_GREETING.size - len(greeting))
    except OSError:
        return False
    greeting += found
    return bool(found)


def _read(connection: socket.socket, piece: memoryview) -> memoryview:
    """Fill `piece` from a connection; raise OSError if it ends before."""
    at = 0
    while at < len(piece):
        num_bytes = connection.recv_into(piece[at:], flags=socket.MSG_WAITALL)
        if num_bytes == 0:
            raise OSError(None, "the connection of a peer ended early")
        at += num_bytes
    return piece
