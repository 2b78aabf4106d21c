"""The interface of transports: transfers between two ranks, posted together and waited for one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError

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
    """

    def post(self, transfers: Sequence[Transfer], all_to_all: bool = False) -> Sequence[Pending]:
        """Start transfers and return one :class:`Pending` for each, in the same order.

        Args:
            transfers: sends and receives of this rank.
            all_to_all: True if this rank exchanges data with most other ranks.

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
