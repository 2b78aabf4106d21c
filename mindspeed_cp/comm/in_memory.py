"""Transfers between ranks that share one process: no process group, no threads, deterministic.

A network holds the transports of all ranks. A rank must never wait for a transfer of which only one end is posted:
nothing else would run meanwhile. Whoever drives the ranks therefore resumes a rank only when everything that it awaits
is ready (:func:`mindspeed_cp.engine.all_ranks.run_all_ranks`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import no_grad, uint8

from mindspeed_cp.comm.group_transport import Transfer
from mindspeed_cp.errors import PeerError

#: Bytes of this value are NaN in every floating-point type.
NAN_BYTE = 0xFF


class InMemoryNetwork:
    """Carries transfers between all ranks of a group inside one process.

    Sends and receives are matched by (source, target, tag), in the order in which they are posted. A receive buffer is
    filled with NaN until its data arrive, so a missing wait shows in the result. A send completes only when its receive
    has been posted, as the slowest transport may behave.

    Args:
        ranks: number of ranks.
        lazy: False copies a message as soon as both ends are posted, so a receive buffer that is still being read when
            it is posted shows. True copies it when one of its ends waits, so a send buffer that is overwritten too
            early shows.

    Attributes:
        unfinished: transfers that have been posted and not been waited for, in the order of posting.
    """

    def __init__(self, ranks: int, lazy: bool = False) -> None:
        self.lazy = lazy
        self.unfinished: dict[InMemoryPending, None] = {}
        self._transports = [InMemoryTransport(self, rank) for rank in range(ranks)]
        self._unmatched: dict[tuple[int, int, int, bool], deque[InMemoryPending]] = {}

    def transport(self, rank: int) -> InMemoryTransport:
        """Return the transport of a rank."""
        return self._transports[rank]

    def check_empty(self) -> None:
        """Check that every transfer was matched and waited for.

        Raises:
            PeerError: a transfer was not; names all of them.
        """
        if self.unfinished:
            problems = [
                f"{pending.description}, {'no rank waits for it' if pending.ready else 'the other end is not posted'}"
                for pending in self.unfinished
            ]
            raise PeerError(f"transfers left over: {'; '.join(problems)}")

    def match(self, pending: InMemoryPending) -> None:
        """Connect a posted transfer with its other end, if that is posted."""
        transfer = pending.transfer
        ends = (pending.rank, transfer.peer) if transfer.sends else (transfer.peer, pending.rank)
        opposite = self._unmatched.get((*ends, transfer.tag, not transfer.sends))
        if opposite:
            pending.connect(opposite.popleft(), copy_now=not self.lazy)
        else:
            self._unmatched.setdefault((*ends, transfer.tag, transfer.sends), deque()).append(pending)


class InMemoryTransport:
    """The transport of one rank; see :class:`mindspeed_cp.comm.group_transport.Transport`.

    Attributes:
        rank: the rank.
    """

    def __init__(self, network: InMemoryNetwork, rank: int) -> None:
        self._network, self.rank = network, rank

    def post(self, transfers: Sequence[Transfer], all_to_all: bool = False) -> list[InMemoryPending]:
        """Start transfers.

        Raises:
            PeerError: the two ends of a message have different shapes or types, or a tensor is not contiguous.
        """
        pending = [InMemoryPending(self._network, self.rank, transfer) for transfer in transfers]
        for item, transfer in zip(pending, transfers, strict=True):
            if not transfer.tensor.is_contiguous():
                raise PeerError(f"{item.description}: the tensor is not contiguous")
            if not transfer.sends:
                with no_grad():
                    transfer.tensor.view(uint8).fill_(NAN_BYTE)
            self._network.unfinished[item] = None
            self._network.match(item)
        return pending


class InMemoryPending:
    """A posted transfer; see :class:`mindspeed_cp.comm.group_transport.Pending`."""

    __slots__ = ("_copied", "_network", "_opposite", "rank", "transfer")

    def __init__(self, network: InMemoryNetwork, rank: int, transfer: Transfer) -> None:
        self._network, self.rank, self.transfer = network, rank, transfer
        self._opposite: InMemoryPending | None = None
        self._copied = False

    @property
    def ready(self) -> bool:
        """True if the other end is posted, so that `wait` returns at once."""
        return self._copied or self._opposite is not None

    @property
    def description(self) -> str:
        """This end of the message, for errors."""
        transfer = self.transfer
        action = "sending to" if transfer.sends else "receiving from"
        shape = f"{list(transfer.tensor.shape)} {transfer.tensor.dtype}"
        return f"rank {self.rank}: {action} rank {transfer.peer}, {transfer.label} ({shape}, tag {transfer.tag})"

    def connect(self, opposite: InMemoryPending, copy_now: bool) -> None:
        """Make two ends one message."""
        tensor, opposite_tensor = self.transfer.tensor, opposite.transfer.tensor
        if tensor.shape != opposite_tensor.shape or tensor.dtype != opposite_tensor.dtype:
            raise PeerError(f"the ends of a message differ: {self.description}; {opposite.description}")
        self._opposite, opposite._opposite = opposite, self
        if copy_now:
            self._copy()

    def wait(self) -> None:
        """Complete the transfer.

        Raises:
            PeerError: the other end is not posted.
        """
        if not self.ready:
            raise PeerError(f"{self.description}: the other end is not posted")
        if not self._copied:
            self._copy()
        self._network.unfinished.pop(self, None)

    def _copy(self) -> None:
        opposite = self._opposite
        assert opposite is not None
        source, target = (self, opposite) if self.transfer.sends else (opposite, self)
        with no_grad():
            target.transfer.tensor.copy_(source.transfer.tensor)
        self._copied = opposite._copied = True
        self._opposite = opposite._opposite = None  # no cycle, so that buffers are freed at once
