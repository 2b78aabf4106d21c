"""Ports for programs that tests start."""

from __future__ import annotations

import socket


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
