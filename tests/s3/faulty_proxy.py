"""A loopback HTTP/1.1 proxy for tests: counts the bytes of every request and injects faults."""

from __future__ import annotations

import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

_BLOCK = 1 << 16


@dataclass
class Fault:
    """A fault for the next `times` requests whose method and path match.

    Attributes:
        action: `status` answers with `code`; `reset` drops the connection, `truncate` closes it and `stall` goes
            silent for `seconds` first, each after `after` bytes of the body.
        then: called at that moment.
    """

    action: str
    method: str = "GET"
    path: str = ""
    times: int = 1
    code: int = 503
    after: int = 0
    seconds: float = 30.0
    then: Callable[[], object] | None = None


@dataclass
class Request:
    """A forwarded request.

    Attributes:
        client: port at the other end of its connection.
        sent, received: bytes of its body and of the answer's.
    """

    method: str
    path: str
    range: str
    client: int
    status: int = 0
    sent: int = 0
    received: int = 0


class FaultyProxy:
    """Listens on a free port of loopback and forwards to another."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    while _forward(proxy, self.rfile, self.connection):
                        pass
                except (OSError, ValueError):
                    pass

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def clear(self) -> None:
        """Forget the faults and the requests."""
        self.faults, self.requests = [], []

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def bytes_read(self, path: str) -> int:
        """Bytes of the bodies of answers to GET requests of an object."""
        return sum(one.received for one in self.requests if one.method == "GET" and path in one.path)

    def seen(self, request: Request) -> Fault | None:
        """Note a request; the fault that is to happen to it."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and fault.method == request.method and re.search(fault.path, request.path):
                    fault.times -= 1
                    return fault
        return None


def _forward(proxy: FaultyProxy, reader: BinaryIO, client: socket.socket) -> bool:
    """Forward one request; returns whether the connection can take another."""
    line, headers, raw = _head(reader)
    if not line:
        return False
    method, path, _ = line.split(" ", 2)
    request = Request(method, path, headers.get("range", ""), client.getpeername()[1])
    fault = proxy.seen(request)
    if headers.get("expect", "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", raw)
    if fault is not None and fault.action == "status":
        _copy_body(reader, headers, lambda _: None)
        request.status = fault.code
        # As S3 names them: what code a client sees depends on the body, not on the status alone.
        name = b"AccessDenied" if fault.code == 403 else b"SlowDown"
        body = b"" if method == "HEAD" else b"<Error><Code>%s</Code><Message>injected</Message></Error>" % name
        client.sendall(b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\n\r\n" % (fault.code, len(body)) + body)
        return True
    with socket.create_connection(("127.0.0.1", proxy.upstream), timeout=60) as upstream:
        upstream.sendall(raw)

        def up(data: bytes) -> None:
            request.sent += len(data)
            upstream.sendall(data)

        _copy_body(reader, headers, up)
        answers = upstream.makefile("rb")
        while True:
            answer, answer_headers, answer_raw = _head(answers)
            if not answer:
                raise ConnectionError("the server went away")
            if not answer.startswith("HTTP/1.1 100"):
                break
        request.status = int(answer.split(" ")[1])
        client.sendall(answer_raw)

        def down(data: bytes) -> None:
            if fault is not None and request.received + len(data) >= fault.after:
                _break(proxy, fault, request, data, client)
            request.received += len(data)
            client.sendall(data)

        if method != "HEAD" and request.status not in (204, 304):
            _copy_body(answers, answer_headers, down)
    return "close" not in (headers.get("connection", "") + answer_headers.get("connection", "")).lower()


def _break(proxy: FaultyProxy, fault: Fault, request: Request, data: bytes, client: socket.socket) -> NoReturn:
    """Inject a fault in the middle of an answer."""
    head = data[: max(0, fault.after - request.received)]
    client.sendall(head)
    request.received += len(head)
    if fault.then is not None:
        fault.then()
    if fault.action == "stall":
        proxy.closing.wait(fault.seconds)
    if fault.action == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    raise ConnectionAbortedError(fault.action)


def _head(reader: BinaryIO) -> tuple[str, dict[str, str], bytes]:
    """Read first line, headers by lower-case name, and the raw bytes; an empty line if the peer has closed."""
    lines = []
    while True:
        line = reader.readline()
        if not line:
            return "", {}, b""
        lines.append(line)
        if line == b"\r\n":
            break
    pairs = (line.decode("latin1").split(":", 1) for line in lines[1:-1])
    return lines[0].decode("latin1").strip(), {name.lower(): value.strip() for name, value in pairs}, b"".join(lines)


def _copy_body(reader: BinaryIO, headers: dict[str, str], write: Any) -> None:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            size = reader.readline()
            data = reader.read(int(size.split(b";")[0], 16) + 2)
            write(size + data)
            if len(data) == 2:
                return
    left = int(headers.get("content-length", 0))
    while left:
        # What has come, not a full block: a stall or a kill must not hold back what came before it.
        data = reader.read1(min(_BLOCK, left))
        if not data:
            raise ConnectionError("cut short")
        left -= len(data)
        write(data)
