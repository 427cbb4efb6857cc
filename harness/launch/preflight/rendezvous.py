"""Check that MASTER_ADDR and MASTER_PORT lead every node to the first one, and compare the nodes' clocks."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from typing import Any

from harness.errors import HarnessError
from harness.launch.ranks import NodePlace

_ONE_EXCHANGE_S = 3.0


def check_rendezvous(address: str, port: int, place: NodePlace, *, timeout_s: float) -> dict[str, Any]:
    """Listen if this is the first node, and connect to the first node.

    Returns:
        `offset_s`, the seconds by which this node's clock is ahead of the first node's.

    Raises:
        HarnessError: the port is taken, or the address leads nowhere or to something else.
    """
    if place.number > 0:
        return _connect(address, port, place, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    with _listen(port) as server:
        server_thread = threading.Thread(target=_serve, args=(server, place, deadline), daemon=True)
        server_thread.start()
        facts = _connect(address, port, place, timeout_s=timeout_s / 2)
        server_thread.join()
    return facts


def check_own_name(num_nodes: int) -> dict[str, Any]:
    """Check that the node's own name, whose address gloo gives to the other ranks, has an address they can reach."""
    if num_nodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    if all(_is_loopback(address) for address in addresses):
        state = f"is {', '.join(sorted(addresses))}" if addresses else "has no address"
        raise HarnessError(
            f"the node's own name {own} {state}, which gloo would give to the other nodes",
            where="/etc/hosts",
            fix="set cluster.env.GLOO_SOCKET_IFNAME=INTERFACE, or correct /etc/hosts of the node",
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
            fix="submit again: another process has taken the port since the job began",
        ) from None


def _serve(server: socket.socket, place: NodePlace, deadline: float) -> None:
    server.settimeout(0.2)
    connected: set[str] = set()
    while len(connected) < place.num_nodes and time.monotonic() < deadline:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        with connection:
            try:
                connection.settimeout(_ONE_EXCHANGE_S)
                request = json.loads(connection.makefile().readline())
                if request["attempt"] == place.attempt:
                    connection.sendall(_line({"now": time.time()}))
                    # The client hangs up first, so that the port is free at once.
                    connection.recv(1)
                    connected.add(request["node"])
            except (OSError, ValueError, KeyError, TypeError):
                continue


def _connect(address: str, port: int, place: NodePlace, *, timeout_s: float) -> dict[str, Any]:
    where = f"MASTER_ADDR {address or 'is not set'}, port {port}"
    fix = "set cluster.master_addr=%NSUFFIX, the name by which other nodes reach the first one"
    try:
        resolved = str(socket.getaddrinfo(address or "\0", port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HarnessError(f"MASTER_ADDR {address!r} does not resolve: {reason}", where=where, fix=fix) from None
    # Only names that are loopback everywhere: a node's own name may be so on that node alone (Debian's 127.0.1.1).
    if place.num_nodes > 1 and (address.partition(".")[0] == "localhost" or _is_loopback(address)):
        raise HarnessError(
            f"MASTER_ADDR {address} is the loopback of each node, not the first node", where=where, fix=fix
        )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return {"offset_s": _exchange(resolved, port, {"attempt": place.attempt, "node": place.node})}
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise HarnessError(
                f"the first node does not answer at MASTER_ADDR {address} ({resolved}), port {port}: {reason}",
                where=where,
                fix=f"{fix}; or open ports 20000 to 31999 between the nodes, if a firewall closes them",
            )
        time.sleep(0.2)


def _exchange(address: str, port: int, request: dict[str, str]) -> float:
    """Return the seconds by which this clock is ahead of the first node's, accurate to half the exchange's duration."""
    with socket.create_connection((address, port), timeout=_ONE_EXCHANGE_S) as connection:
        before = time.time()
        connection.sendall(_line(request))
        answer = json.loads(connection.makefile().readline() or "null")
        after = time.time()
    if not isinstance(answer, dict) or not isinstance(answer.get("now"), float):
        raise ValueError("the process that answers is not a node of this job")
    return float((before + after) / 2 - answer["now"])


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values) + "\n").encode()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
