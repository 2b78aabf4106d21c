"""Point-to-point transfers between the ranks of a group, posted together and finished one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm.lanes import existing_group, in_order, lanes_of, library_of
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.npu_errors import HCCL_REMEDY, cause, is_lost_peer

DEFAULT_TIMEOUT = 600.0  # seconds
LEAST_TIMEOUT, MOST_TIMEOUT = 0.001, 1e9  # gloo counts whole milliseconds, and takes 0 of them for no time-out


@dataclass(frozen=True)
class Transfer:
    """One tensor to one peer, or from it.

    Attributes:
        tensor: contiguous; sent, or written. The caller leaves it alone until the transfer is finished.
        peer: rank in the group.
        sends: True to send, False to receive.
        tag: the same number on both sides; tells transfers between the same two ranks apart.
        what: for error messages.
    """

    tensor: Tensor
    peer: int
    sends: bool
    tag: int
    what: str


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when it is finished: on the CPU when the bytes are there, on a device when its stream waits for them.

        Raises:
            PeerError: the peer died, or did not answer within the time-out.
        """


class Transport:
    """Transfers over one process group.

    All transfers of a step are posted before any is waited for, in the plan's order, so sends and receives run at the
    same time and a ring of any size, odd ones too, makes progress. On gloo, and where the group has lanes
    (:func:`mindspeed_cp.comm.open_lanes`), each transfer is an operation of its own; with lanes every direction of
    every pair has a stream of its own. Else, on NCCL and HCCL, the transfers of a step are one coalesced launch
    (`batch_isend_irecv`), which those libraries need for a send and a receive between the same two ranks to run side by
    side, on the group's stream. These streams wait for the tensors that the current stream has written, and `wait`
    makes the current stream wait for them: the host never blocks.

    Args:
        group: process group; None for the default group.
        timeout: seconds until a peer that does not answer is given up (gloo; NCCL and HCCL use the group's own
            time-out).
        device: of the tensors; a group may serve several kinds of device by several libraries.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float = DEFAULT_TIMEOUT,
        device: torch.device | None = None,
    ) -> None:
        self.timeout = checked_timeout(timeout)
        self.group = existing_group(group)
        self._limit = timedelta(seconds=self.timeout)
        self._rank = dist.get_rank(self.group)
        self._global = dist.get_process_group_ranks(self.group)
        library = library_of(self.group, "cpu" if device is None else device)
        self._on_host = library == "gloo"
        self._peers_once = library == "hccl"  # HcclBatchSendRecv takes one send and one receive for a rank (CANN 8)
        self._lanes = lanes_of(self.group)

    def post(self, transfers: Sequence[Transfer], with_all: bool = False) -> list[Pending]:
        """Start transfers; one object to wait for each, in the same order.

        Args:
            transfers: what this rank sends and receives.
            with_all: this rank exchanges with most others, as in an all-to-all: one launch, where the library has that,
                and not a communicator for each pair.

        Raises:
            PeerError: a peer is known to be gone.
        """
        if not self._on_host and (self._lanes is None or with_all):
            return self._post_coalesced(transfers)
        order = receives_first(transfers) if self._on_host else self._in_turn(transfers)
        posted = {i: self._post_one(transfers[i]) for i in order}
        return [posted[i] for i in range(len(transfers))]

    def _in_turn(self, transfers: Sequence[Transfer]) -> list[int]:
        """Numbers of transfers in the order in which all ranks go through the edges of a step: the first one over a
        lane makes a communicator, for which both ends wait, and in another order ranks could wait in a circle."""
        edges = [(self._rank, t.peer) if t.sends else (t.peer, self._rank) for t in transfers]
        turn = {edge: number for number, edge in enumerate(in_order(set(edges), len(self._global)))}
        return sorted(range(len(transfers)), key=lambda i: turn[edges[i]])

    def _post_one(self, transfer: Transfer) -> Pending:
        peer = self._global[transfer.peer]
        start = dist.isend if transfer.sends else dist.irecv
        source, target = (self._rank, transfer.peer) if transfer.sends else (transfer.peer, self._rank)
        group = self.group if self._lanes is None else self._lanes.of(source, target)
        try:
            return _Work(self, transfer, start(transfer.tensor, peer, group, transfer.tag))
        except RuntimeError as error:
            if self._of_another(error):
                raise
            raise self.failure(transfer, error) from error

    def _post_coalesced(self, transfers: Sequence[Transfer]) -> list[Pending]:
        if not transfers:
            return []
        pending: list[Pending | None] = [None] * len(transfers)
        for launch in launches(transfers) if self._peers_once else [range(len(transfers))]:
            operations = [
                dist.P2POp(dist.isend if t.sends else dist.irecv, t.tensor, self._global[t.peer], self.group, t.tag)
                for t in (transfers[i] for i in launch)
            ]
            try:
                works = dist.batch_isend_irecv(operations)
            except RuntimeError as error:
                if self._of_another(error):
                    raise
                raise self.failure(transfers[launch[0]], error) from error
            # One object for the whole launch, or one each, depending on the library.
            for number, i in enumerate(launch):
                pending[i] = _Work(self, transfers[i], works[min(number, len(works) - 1)])
        return [one for one in pending if one is not None]

    def wait(self, transfer: Transfer, work: Any) -> None:
        """Wait for one work object; see :class:`Pending`."""
        try:
            work.wait(self._limit) if self._on_host else work.wait()
        except RuntimeError as error:
            if self._of_another(error):
                raise
            raise self.failure(transfer, error) from error

    def _of_another(self, error: RuntimeError) -> bool:
        """Whether it is no word about a peer: on a device, an operator may have failed long before."""
        if self._peers_once:
            return not is_lost_peer(str(error))
        return not self._on_host and (isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error))

    def failure(self, transfer: Transfer, error: RuntimeError) -> PeerError:
        """The error that names the peer."""
        text = " ".join(str(error).split())
        late = "timed out" in text.lower() or "timeout" in text.lower()
        if self._on_host:
            why = f"no answer within {self.timeout:g} s" if late else f"the connection failed ({text[:160]})"
        else:  # the time-out is the group's, or the library's own
            why = f"the connection failed ({cause(str(error))})" + f"; {HCCL_REMEDY}" * self._peers_once
        side = "sending to" if transfer.sends else "receiving from"
        return PeerError(
            f"rank {self._rank}: {side} rank {transfer.peer} (global rank {self._global[transfer.peer]}), "
            f"{transfer.what}: {why}"
        )


def receives_first(transfers: Sequence[Transfer]) -> list[int]:
    """Numbers of transfers, receives before sends. With gloo a receive tells the sender that it is there, over the
    connection on which this rank's own data go: behind these the message of a large exchange would not begin until they
    have arrived, and the two directions would take turns."""
    return sorted(range(len(transfers)), key=lambda i: transfers[i].sends)


def launches(transfers: Sequence[Transfer]) -> list[list[int]]:
    """Numbers of transfers in launches that have one send to a rank, and one receive from it, at most: the n-th to or
    from a rank is in the n-th launch, at both its ends."""
    found: list[list[int]] = []
    seen: dict[tuple[int, bool], int] = {}
    for number, transfer in enumerate(transfers):
        key = transfer.peer, transfer.sends
        turn = seen[key] = seen.get(key, -1) + 1
        found += [[] for _ in range(turn + 1 - len(found))]
        found[turn].append(number)
    return found


class _Work:
    """A transfer under way; keeps the tensor alive."""

    __slots__ = ("_transfer", "_transport", "_work")

    def __init__(self, transport: Transport, transfer: Transfer, work: Any) -> None:
        self._transport, self._transfer, self._work = transport, transfer, work

    def wait(self) -> None:
        self._transport.wait(self._transfer, self._work)


def checked_timeout(timeout: object) -> float:
    """Seconds as they are used, a millisecond at the least.

    Raises:
        ConfigError: they are no number above 0.
    """
    is_number = isinstance(timeout, (int, float, np.integer, np.floating)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= MOST_TIMEOUT:  # type: ignore[operator]
        shown = timeout if is_number else repr(timeout)
        raise ConfigError(f"timeout is {shown} seconds; valid: more than 0, at most {MOST_TIMEOUT:.0e}")
    return max(float(timeout), LEAST_TIMEOUT)  # type: ignore[arg-type]


def _check_group(group: object) -> None:
    # NON_GROUP_MEMBER is what new_group gives a process that is not in the group.
    if group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    raise ConfigError(f"group is {group!r}; valid: a torch.distributed.ProcessGroup, or None for all processes")


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 when torch.distributed is not initialised and no group is given; -1 where this process is
    not in the group.

    Raises:
        ConfigError: it is no group.
    """
    _check_group(group)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 when torch.distributed is not initialised and no group is given."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank(group)


def staging(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """A buffer for `rows` rows of the shape of `like` [rows, heads, dim]."""
    return like.new_empty((rows, *like.shape[1:]), dtype=dtype)
