"""Transfers between two ranks, posted together and waited for one by one: their interface, and over a process group, on
HCCL, NCCL and gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm.directional_groups import OPEN_GROUPS, DirectionalGroups, connection_order
from mindspeed_cp.comm.groups import comm_library, failure_reason, resolve_group
from mindspeed_cp.device.npu_errors import HCCL_REMEDY, is_lost_peer, short_cause
from mindspeed_cp.errors import ConfigError, PeerError

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
        due: number of the step that waits for it, the same at both ends. Transfers that are posted together and due at
            once may be one launch, of which nothing is there before all is.
    """

    tensor: Tensor
    peer: int
    sends: bool
    tag: int
    label: str
    due: int = 0


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


class GroupTransport:
    """Carries transfers over one process group.

    All transfers of a step are posted before any is waited for, in the order of the plan, so that sends and receives
    run concurrently and rings of any size, odd sizes included, make progress. On gloo, and if the group has directional
    groups (:func:`mindspeed_cp.comm.open_directional_groups`), each transfer is an operation of its own; with
    directional groups, each direction of each pair has its own stream. Otherwise, on NCCL and HCCL, the transfers of a
    step that are due in the same step are one coalesced launch (`batch_isend_irecv`) on the stream of the group, those
    that are due first before others: these libraries need it to run a send and a receive between the same two ranks
    concurrently. Streams wait for the tensors that the current stream has
    written, and `wait` makes the current stream wait for them; the host never blocks.

    Args:
        group: process group; None for the default group.
        timeout: seconds to wait for a peer (gloo; NCCL and HCCL use the timeout of their group).
        device: device of the tensors; a group may use different libraries for different devices.

    Attributes:
        group, timeout: as given; None resolved to the default group.
        is_gloo: True if the library is gloo.
        gloo_timeout: timeout of a wait on gloo.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float = DEFAULT_TIMEOUT,
        device: torch.device | None = None,
    ) -> None:
        self.timeout = checked_timeout(timeout)
        self.group = resolve_group(group)
        self.gloo_timeout = timedelta(seconds=self.timeout)
        self._rank = dist.get_rank(self.group)
        self._global_ranks = dist.get_process_group_ranks(self.group)
        library = comm_library(self.group, "cpu" if device is None else device)
        self.is_gloo = library == "gloo"
        self._is_hccl = library == "hccl"

    def post(self, transfers: Sequence[Transfer], all_to_all: bool = False) -> list[Pending]:
        """Start transfers; see :meth:`Transport.post`. With ``all_to_all``, NCCL and HCCL run one launch in the group
        instead of creating a communicator for each pair."""
        directional = OPEN_GROUPS.get(self.group)  # not kept: they may be opened or closed between two calls
        if not self.is_gloo and (directional is None or all_to_all):
            return self._post_coalesced(transfers)
        # A gloo receive announces itself to the sender over the connection that carries this rank's own data: queued
        # behind the data, the announcement of a large exchange would arrive after them, and the two directions would
        # take turns. Receives therefore come first.
        indices = range(len(transfers))
        order = sorted(indices, key=lambda i: transfers[i].sends) if self.is_gloo else self._connection_order(transfers)
        posted = {i: self._post_one(transfers[i], directional) for i in order}
        return [posted[i] for i in indices]

    def _connection_order(self, transfers: Sequence[Transfer]) -> list[int]:
        """Return indices of transfers in the order in which all ranks go through the edges of a step: the first
        transfer over an edge creates a communicator, for which both ends wait, and different orders could wait in a
        circle."""
        edges = [(self._rank, t.peer) if t.sends else (t.peer, self._rank) for t in transfers]
        position = {edge: i for i, edge in enumerate(connection_order(set(edges), len(self._global_ranks)))}
        return sorted(range(len(transfers)), key=lambda i: position[edges[i]])

    def _post_one(self, transfer: Transfer, directional: DirectionalGroups | None = None) -> Pending:
        peer = self._global_ranks[transfer.peer]
        start = dist.isend if transfer.sends else dist.irecv
        group = self.group
        if directional is not None:
            ends = (self._rank, transfer.peer) if transfer.sends else (transfer.peer, self._rank)
            group = directional.group_for(*ends)
        work = self.attempt(transfer, lambda: start(transfer.tensor, peer, group, transfer.tag))
        return _PendingWork(self, transfer, work)

    def _post_coalesced(self, transfers: Sequence[Transfer]) -> list[Pending]:
        if not transfers:
            return []
        pending: dict[int, Pending] = {}
        for launch in split_launches(transfers, one_each=self._is_hccl):
            operations = [
                dist.P2POp(
                    dist.isend if t.sends else dist.irecv, t.tensor, self._global_ranks[t.peer], self.group, t.tag
                )
                for t in (transfers[i] for i in launch)
            ]
            works = self.attempt(transfers[launch[0]], partial(dist.batch_isend_irecv, operations))
            # One work object for the whole launch, or one for each operation, depending on the library.
            for position, i in enumerate(launch):
                pending[i] = _PendingWork(self, transfers[i], works[min(position, len(works) - 1)])
        return [pending[i] for i in range(len(transfers))]

    def attempt(self, transfer: Transfer, call: Callable[[], Any]) -> Any:
        """Return the result of a call of the library; an error in it that blames a peer names the one of a transfer."""
        try:
            return call()
        except RuntimeError as error:
            if self._is_unrelated(error):
                raise
            action = "sending to" if transfer.sends else "receiving from"
            raise PeerError(
                f"rank {self._rank}: {action} rank {transfer.peer} (global rank {self._global_ranks[transfer.peer]}), "
                f"{transfer.label}: {self._reason(error)}"
            ) from error

    def _is_unrelated(self, error: RuntimeError) -> bool:
        """Return True if the error does not blame a peer: on a device, an earlier operator may have failed."""
        if self._is_hccl:
            return not is_lost_peer(str(error))
        return not self.is_gloo and (isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error))

    def _reason(self, error: RuntimeError) -> str:
        if self.is_gloo:
            return failure_reason(error, self.timeout)
        # the timeout is that of the group or of the library
        return f"the connection failed ({short_cause(str(error))})" + f"; {HCCL_REMEDY}" * self._is_hccl


def split_launches(transfers: Sequence[Transfer], one_each: bool = True) -> list[list[int]]:
    """Split indices of transfers into launches of those that are due in one step, those that are due first before
    others. The n-th transfer to or from a rank is in the n-th of them at both of its ends if `one_each`, else all are
    in one."""
    # HcclBatchSendRecv (CANN 8) takes one send to and one receive from a rank in a list: K and V are two launches.
    launches: dict[tuple[int, int], list[int]] = {}
    counts: dict[tuple[int, int, bool], int] = {}
    for index, transfer in enumerate(transfers):
        key = transfer.due, transfer.peer, transfer.sends
        number = counts.get(key, 0)
        counts[key] = number + one_each
        launches.setdefault((transfer.due, number), []).append(index)
    return [launches[key] for key in sorted(launches)]


class _PendingWork(NamedTuple):
    """A posted transfer. It keeps its tensor alive."""

    transport: GroupTransport
    transfer: Transfer
    work: Any

    def wait(self) -> None:
        """See :class:`Pending`."""
        transport = self.transport
        wait = partial(self.work.wait, transport.gloo_timeout) if transport.is_gloo else self.work.wait
        transport.attempt(self.transfer, wait)
