"""The interface of transports: transfers between two ranks, posted together and waited for one by one, and exchanges
of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.program import aligned

DEFAULT_TIMEOUT = 600.0  # seconds
MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 1e9  # gloo counts whole milliseconds, and treats 0 of them as no timeout


@dataclass(frozen=True)
class Transfer:
    """One tensor sent to a peer or received from it.

    Attributes:
        tensor: contiguous; read by a send, written by a receive. The caller must not touch it until the transfer has
            been waited for.
        peer: rank in the group.
        sends: True to send, False to receive.
        tag: the same number at both ends; distinguishes transfers between the same two ranks.
        label: description for error messages.
    """

    tensor: Tensor
    peer: int
    sends: bool
    tag: int
    label: str


@dataclass(frozen=True)
class ExchangePart:
    """One tensor in an exchange.

    Attributes:
        peer: rank at the other end.
        sends: True to send, False to receive.
        shape, dtype: the same at both ends.
    """

    peer: int
    sends: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes in the buffer, with the padding behind them."""
        return int(aligned(prod(self.shape) * self.dtype.itemsize))


@dataclass(frozen=True)
class ExchangeBuffers:
    """The two buffers of one rank.

    Attributes:
        send, receive: uint8 [bytes], for all peers in ascending order.
        send_bytes, receive_bytes: bytes for each rank.
    """

    send: Tensor
    receive: Tensor
    send_bytes: Sequence[int]
    receive_bytes: Sequence[int]


def exchange_buffers(
    parts: Sequence[ExchangePart], ranks: int, device: torch.device
) -> tuple[ExchangeBuffers, list[Tensor]]:
    """Allocate the buffers of a rank.

    Rows of several messages, slots and types lie packed in one send buffer and one receive buffer, peer by peer
    (:mod:`mindspeed_cp.plan.program` describes the order), so that an exchange is one call of the communication
    library: an all-to-all-v of bytes.

    Args:
        parts: what the rank sends and receives; the parts of two ranks have one order at both ends.
        ranks: number of ranks.
        device: device of the buffers.

    Returns:
        The buffers, and for each part its view in one of them, of its shape and type.
    """
    views: list[Tensor | None] = [None] * len(parts)
    buffers, sizes = [], []
    for sends in (True, False):
        order = sorted((i for i, part in enumerate(parts) if part.sends == sends), key=lambda i: parts[i].peer)
        buffer = torch.empty(sum(parts[i].size for i in order), dtype=torch.uint8, device=device)
        per_rank, offset = [0] * ranks, 0
        for i in order:
            part = parts[i]
            payload = buffer[offset : offset + prod(part.shape) * part.dtype.itemsize]
            views[i] = payload.view(part.dtype).view(part.shape)
            per_rank[part.peer] += part.size
            offset += part.size
        buffers.append(buffer)
        sizes.append(per_rank)
    (send, receive), (send_bytes, receive_bytes) = buffers, sizes
    return ExchangeBuffers(send, receive, send_bytes, receive_bytes), [view for view in views if view is not None]


class Pending(Protocol):
    """A transfer that has been posted."""

    def wait(self) -> None:
        """Wait for the transfer: on the CPU until the bytes have arrived, on a device by making its stream wait.

        Raises:
            PeerError: the peer died or did not answer within the timeout.
        """


class Transport(Protocol):
    """Carries transfers between the ranks of a group: :class:`GroupTransport` over a process group,
    :class:`InMemoryTransport` between ranks that share one process.

    Attributes:
        ranks: number of ranks.
    """

    @property
    def ranks(self) -> int: ...

    def post(self, transfers: Sequence[Transfer], all_to_all: bool = False) -> Sequence[Pending]:
        """Start transfers and return one :class:`Pending` for each, in the same order.

        Args:
            transfers: sends and receives of this rank.
            all_to_all: True if this rank exchanges data with most other ranks.

        Raises:
            PeerError: a peer is known to be gone.
        """

    def all_to_all(self, buffers: ExchangeBuffers, label: str) -> Pending:
        """Start an exchange of all ranks. Every rank calls it, also with empty buffers, in the order of its other
        exchanges; the received bytes are there when it has been waited for.

        Args:
            buffers: what this rank sends, and where it receives. The caller must not touch them until then.
            label: description for error messages.

        Raises:
            PeerError: a peer is known to be gone.
        """


def checked_timeout(timeout: object) -> float:
    """Return a timeout in seconds, at least one millisecond.

    Raises:
        ConfigError: the timeout is not a number above 0.
    """
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= MAX_TIMEOUT:  # type: ignore[operator]
        shown = timeout if is_number else repr(timeout)
        raise ConfigError(f"timeout is {shown} seconds; valid: more than 0, at most {MAX_TIMEOUT:.0e}")
    return max(float(timeout), MIN_TIMEOUT)  # type: ignore[arg-type]


def staging_buffer(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized buffer for ``rows`` rows shaped like those of ``like`` [rows, heads, dim]."""
    return like.new_empty((rows, *like.shape[1:]), dtype=dtype)
