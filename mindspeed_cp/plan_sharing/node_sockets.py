"""Sockets between the ranks of one machine, for the threads that plan.

No process group is used: a wait may last as long as a checkpoint takes, and ends when the work ends, or after a limit.
The system closes the sockets of a rank that dies, so nobody waits for it. Only the user who runs the ranks can connect.

A frame is a kind (1 byte), the length of its content (8 bytes) and the content.
"""

from __future__ import annotations

import math
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mindspeed_cp.errors import ConfigError, PeerError

POLL_SECONDS = 0.2  # interval of the checks for the end of the loader
BACKLOG = 1024  # ranks that may call before the first one is answered

_FRAME, _RANK = struct.Struct("<BQ"), struct.Struct("<Q")

Pair = tuple[int, int]  # rank that listens, rank that connects


class LoaderEnded(Exception):
    """The loader ended while its thread waited for another rank."""


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for another.

    Attributes:
        is_ended: returns True once the loader has ended.
        seconds: limit of a wait.
    """

    is_ended: Callable[[], bool]
    seconds: float = math.inf

    def wait(self, connection: socket.socket, event: int) -> None:
        """Wait until a socket can be read or written, or its other end is closed.

        Raises:
            LoaderEnded: the loader has ended.
            TimeoutError: the limit has passed.
        """
        poll, began = select.poll(), time.monotonic()
        poll.register(connection, event)
        while not poll.poll(min(POLL_SECONDS, self.seconds) * 1e3):
            if self.is_ended():
                raise LoaderEnded
            if time.monotonic() - began >= self.seconds:
                raise TimeoutError(f"it did not answer within {self.seconds:g} s")


class FrameSocket:
    """A connection to another rank, of one thread.

    Args:
        connection: the socket.
        rank, peer: this rank and the other one.
        patience: how long to wait for the other rank.
    """

    def __init__(self, connection: socket.socket, rank: int, peer: int, patience: Patience) -> None:
        connection.setblocking(False)
        self._connection, self._rank, self._peer, self._patience = connection, rank, peer, patience

    def send(self, kind: int, content: bytes) -> None:
        """Send a frame.

        Raises:
            LoaderEnded: the loader ended before the other rank had room for all of it.
            PeerError: the other rank is gone, or does not answer.
        """
        self._write(_FRAME.pack(kind, len(content)))
        self._write(content)

    def receive(self) -> tuple[int, bytes]:
        """Wait for a frame and return its kind and content; errors as for :meth:`send`."""
        kind, size = _FRAME.unpack(self._read(_FRAME.size))
        return kind, self._read(size)

    def send_rank(self) -> None:
        """Tell the other rank who this one is."""
        self._write(_RANK.pack(self._rank))

    def receive_rank(self) -> int:
        """Return what the other rank tells of itself, which is the peer of the connection from now on."""
        (self._peer,) = _RANK.unpack(self._read(_RANK.size))
        return self._peer

    def close(self) -> None:
        """Close the connection; the other rank still gets what was sent."""
        self._connection.close()

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            try:
                self._patience.wait(self._connection, select.POLLOUT)
                left = left[self._connection.send(left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(str(error)) from None

    def _read(self, size: int) -> bytes:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            try:
                self._patience.wait(self._connection, select.POLLIN)
                count = self._connection.recv_into(left)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(str(error)) from None
            if not count:
                raise self._lost("the connection was closed")
            left = left[count:]
        return bytes(content)

    def _lost(self, cause: str) -> PeerError:
        return PeerError(
            f"rank {self._rank} lost rank {self._peer} of the same machine, with which it shares plans ({cause})"
        )


class Listener:
    """A socket in a folder of its own, which only this user can enter.

    Args:
        setting: name of the setting by which ranks share plans.

    Attributes:
        path: path of the socket.
        connection: the socket.

    Raises:
        ConfigError: the folder for temporary files cannot have one.
    """

    def __init__(self, setting: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="mindspeed-cp-")  # of mode 0700
        self.path = str(Path(self._folder) / "plans")
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.connection.bind(self.path)
            self.connection.listen(BACKLOG)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{setting}: this rank cannot listen on {self.path}: {error}; valid: TMPDIR with a short path on a "
                f"local disk, or {setting} replicated"
            ) from None

    def close(self) -> None:
        """Close the socket and remove its folder; ranks that are connected stay so."""
        self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect_ranks(
    rank: int,
    pairs: Sequence[Pair],
    paths: Mapping[int, str | None],
    listener: Listener | None,
    patience: Patience,
) -> dict[int, FrameSocket]:
    """Connect this rank to those with which it is in a pair.

    Args:
        rank: this rank.
        pairs: pairs of ranks of this machine; those with this rank are the same on both of them.
        paths: where each rank listens, by its number; None: nowhere.
        listener: this rank's own, if it listens.
        patience: how long to wait for another rank.

    Returns:
        The connection to each of these ranks.

    Raises:
        LoaderEnded: the loader ended first.
        PeerError: another rank ended while it connected, or does not connect.
    """
    callers = {other for listening, other in pairs if listening == rank}
    sockets: dict[int, FrameSocket] = {}
    with ExitStack() as stack:
        for peer in sorted({listening for listening, other in pairs if other == rank}):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stack.callback(connection.close)
            try:
                connection.connect(str(paths[peer]))
            except OSError as error:
                raise PeerError(f"rank {rank} cannot reach rank {peer} of the same machine: {error}") from None
            sockets[peer] = FrameSocket(connection, rank, peer, patience)
            sockets[peer].send_rank()
        while callers:
            assert listener is not None
            try:
                patience.wait(listener.connection, select.POLLIN)
            except TimeoutError as error:
                raise PeerError(f"rank {rank} waits for rank {min(callers)} of the same machine: {error}") from None
            connection, _ = listener.connection.accept()
            stack.callback(connection.close)
            caller = FrameSocket(connection, rank, min(callers), patience)
            peer = caller.receive_rank()
            callers.remove(peer)
            sockets[peer] = caller
        stack.pop_all()
    return sockets
