"""Whether MASTER_ADDR and MASTER_PORT lead every node to the first one, and how far the nodes' clocks are apart."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from typing import Any

from harness.errors import HarnessError

_ONE_EXCHANGE_S = 3.0


def check_meeting(
    address: str, port: int, *, name: str, attempt: str, number: int, num_nodes: int, timeout_s: float
) -> dict[str, Any]:
    """Listen as the first node, or ask it who it is; gives the offset of this node's clock from its, in seconds.

    Args:
        name: of this node.
        attempt: what only nodes of this start of the job know.
        number: 0 listens, and asks itself too.

    Raises:
        HarnessError: the port is taken, the address leads nowhere or elsewhere.
    """
    if number > 0:
        return _ask(address, port, name=name, attempt=attempt, may_be_local=False, timeout_s=timeout_s)
    ends = time.monotonic() + timeout_s
    with _listen(port) as server:
        met: set[str] = set()
        answering = threading.Thread(target=_answer, args=(server, met, attempt, ends, num_nodes), daemon=True)
        answering.start()
        found = _ask(address, port, name=name, attempt=attempt, may_be_local=num_nodes == 1, timeout_s=timeout_s / 2)
        answering.join()
    return found


def check_own_name(num_nodes: int) -> dict[str, Any]:
    """Gloo tells the other ranks the address of the node's own name: it has to be one that they can reach."""
    if num_nodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = socket.gethostname()
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    if not found or all(_is_loopback(one) for one in found):
        told = f"is {', '.join(sorted(found))}" if found else "has no address"
        raise HarnessError(
            f"the node's own name {own} {told}, which gloo would give to the other nodes",
            where="/etc/hosts",
            fix="cluster.env.GLOO_SOCKET_IFNAME=INTERFACE, or mend the node's /etc/hosts",
        )
    return {}


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise HarnessError(
            f"rank 0 cannot listen on port {port}: {error.strerror}",
            where=socket.gethostname(),
            fix="submit again: another process has taken it since the job began",
        ) from None


def _answer(server: socket.socket, met: set[str], attempt: str, ends: float, num_nodes: int) -> None:
    server.settimeout(0.2)
    while len(met) < num_nodes and time.monotonic() < ends:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            try:
                connection.settimeout(_ONE_EXCHANGE_S)
                asked = json.loads(connection.makefile().readline())
                if asked["attempt"] == attempt:
                    connection.sendall(_line({"now": time.time()}))
                    # The asker hangs up first, so that the port is free at once.
                    connection.recv(1)
                    met.add(asked["node"])
            except (OSError, ValueError, KeyError, TypeError):
                continue


def _ask(address: str, port: int, *, name: str, attempt: str, may_be_local: bool, timeout_s: float) -> dict[str, Any]:
    where = f"MASTER_ADDR {address or 'is not set'}, port {port}"
    fix = "cluster.master_addr=%NSUFFIX, as the other nodes know the first one"
    try:
        found = [str(one[4][0]) for one in socket.getaddrinfo(address or "\0", port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HarnessError(f"MASTER_ADDR {address!r} is no known name: {reason}", where=where, fix=fix) from None
    if not may_be_local and _is_name_of_loopback(address):
        raise HarnessError(
            f"MASTER_ADDR {address} is every node's own loopback, and not the first node", where=where, fix=fix
        )
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return {"offset_s": _exchange(found[0], port, {"attempt": attempt, "node": name})}
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if time.monotonic() > ends:
            raise HarnessError(
                f"the first node does not answer at MASTER_ADDR {address} ({found[0]}), port {port}: {reason}",
                where=where,
                fix=f"{fix}; or a firewall between the nodes closes ports 20000 to 31999",
            )
        time.sleep(0.2)


def _exchange(address: str, port: int, asked: dict[str, str]) -> float:
    """How far this node's clock is ahead of the first one's, in seconds; the error of the exchange is half its time."""
    with socket.create_connection((address, port), timeout=_ONE_EXCHANGE_S) as connection:
        before = time.time()
        connection.sendall(_line(asked))
        answer = json.loads(connection.makefile().readline() or "null")
        after = time.time()
    if not isinstance(answer, dict) or not isinstance(answer.get("now"), float):
        raise ValueError("what answers there is no node of this job")
    return float((before + after) / 2 - answer["now"])


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values) + "\n").encode()


def _is_name_of_loopback(address: str) -> bool:
    """Whether it is loopback everywhere; a node's own name may be so on that node (Debian's 127.0.1.1)."""
    return address == "localhost" or address.startswith("localhost.") or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
