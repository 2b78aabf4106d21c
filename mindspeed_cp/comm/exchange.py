"""Buffers of an exchange, in which all ranks send and receive at once: one all-to-all-v of bytes.

Rows of several messages, slots and types lie packed in one send buffer and one receive buffer of a rank, peer by peer
(:mod:`mindspeed_cp.plan.program` describes the order), so that an exchange is one call of the communication library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mindspeed_cp.plan.program import aligned


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
