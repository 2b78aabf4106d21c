"""Ports for programs that tests start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

#: The ports that this process gave out: an abstract socket per port tells other test processes that it is taken.
_claims: list[socket.socket] = []


def free_port() -> str:
    """A port that nobody listens on, for one use.

    Not one of those that the system gives to outgoing connections, and never given to two callers, so that nobody takes
    it before the program that is to listen there.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(max(1024, first_ephemeral - 16384), first_ephemeral))
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0mindspeed-cp-test-port-{port}")
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return str(port)
    raise RuntimeError(f"no free port from {candidates[0]} to {candidates[-1]}")
