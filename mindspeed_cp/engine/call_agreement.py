"""Compares what the ranks of a group run, in every call of attention: always on, 8 bytes per rank and call.

A digest of the release of this package, the plan, the type of the tensors, the dropout key and, where one is given,
the digest of the batch is gathered before the first message of a call. How soon the result is read depends on the
device::

    tensors on the CPU        the call waits for it: ranks that differ raise before a message travels
    device, group with gloo   a plan's first call waits; later calls go on, and read it in the backward or the next call
    device library alone      no call waits: the digests cross to the host on a stream of their own, and are read late

Where plans are announced (`CallAgreement.announce`), as Megatron models do at the start of a micro-batch, one sum
serves all its calls: the first one waits for it, which was under way while the model computed, and the next
announcement compares what the calls ran, with their types and dropout keys (`train` does so before each update). A rank
whose calls are not what it announced itself is then found after its messages have travelled.

The backward of a call runs what its forward has compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm import failure_reason, group_rank, group_size, has_library, resolve_group
from mindspeed_cp.engine.agreement import RELEASE, compare_plans, digest64, plan_digest
from mindspeed_cp.engine.recorder import timed_span
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.plan import Plan
from mindspeed_cp.schema.messages import name_ranks

COMPARISON = "comparison"  # activity of the wait for other ranks in traces
#: Seconds that a call waits for the comparison, whatever its time-out: then it goes on, since an error of its messages
#: names the rank that is missing. Ranks that differ come less far apart than this, also on a busy machine; a share of a
#: short time-out would let one of them go on before the others have come, and be told less.
WAIT_SECONDS = 30.0
MAX_UNREAD = 64  # comparisons of a group; with more, the oldest is waited for


@dataclass(frozen=True)
class _Comparison:
    """A gather of digests that has been started.

    Attributes:
        digests: on the host, int64 [ranks]; valid once it is finished.
        is_finished: returns True if `wait` does not block.
        wait: waits a number of seconds; raises RuntimeError if a rank died or the time is over.
        call: description of the call on this rank.
        buffers: tensors of the device that the gather uses, kept until it is finished.
    """

    digests: Tensor
    is_finished: Callable[[], bool]
    wait: Callable[[float], Any]
    call: str
    buffers: Sequence[Tensor] = ()


@dataclass
class _Announcement:
    """Comparison of the plans of the calls to come, and of the calls after the announcement before.

    Attributes:
        plans: digests of the plans.
        comparison: the gather.
        is_awaited: True once a call has waited for it.
        calls: digest of the plans, types and dropout keys of the calls since then.
    """

    plans: frozenset[int]
    comparison: _Comparison
    is_awaited: bool = False
    calls: int = 0


_unread: WeakKeyDictionary[dist.ProcessGroup, deque[_Comparison]] = WeakKeyDictionary()
_announced: WeakKeyDictionary[dist.ProcessGroup, _Announcement] = WeakKeyDictionary()  # the latest of each group


def calls_digest(group: dist.ProcessGroup | None) -> int:
    """Return 52 bits of a digest of the calls since the last announcement, equal on all ranks that called alike."""
    announced = _announced.get(resolve_group(group))
    return 0 if announced is None else announced.calls % 2**52


class CallAgreement:
    """Comparison of one plan's calls over a group.

    Args:
        group: context-parallel ranks; None for all processes.
        timeout: seconds to wait for other ranks.
        device: device of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, device: torch.device) -> None:
        self._group = resolve_group(group)
        self._timeout, self._device = timeout, device
        self._rank, self._ranks = group_rank(group), group_size(group)
        self._has_host_library = device.type == "cpu" or has_library(self._group, "cpu")
        self._unread = _unread.setdefault(self._group, deque())
        self._is_agreed = False

    def announce(self, plans: Sequence[Plan], words: str = "") -> None:
        """Start to compare the plans of the calls until the next announcement; every rank of the group calls it.

        The first of these calls waits for it. Groups without gloo, whose calls wait for nothing, do nothing.

        Args:
            plans: of the calls.
            words: what else must be equal, such as the type and the dropout seed.
        """
        if not self._has_host_library:
            return
        digests = [plan_digest(plan) for plan in plans]
        before = _announced.get(self._group)
        compared = (RELEASE, *digests, words, "after", before.calls if before is not None else 0)
        comparison = self._start(digest64(" ".join(map(str, compared))), plans[0])
        _announced[self._group] = _Announcement(frozenset(digests), comparison)

    def check(
        self,
        plan: Plan,
        dtype: torch.dtype,
        dropout: DropoutKey | None = None,
        batch_digest: int | None = None,
        has_sink: bool = False,
    ) -> None:
        """Compare this call with those of the other ranks, and read earlier comparisons that have finished.

        Raises:
            ConfigError: ranks run different releases, plans, types, dropout keys or batches; names ranks and
                differences if this call waits for the comparison, else the ranks.
        """
        self.read_finished()
        details = {
            "dtype": str(dtype),
            "dropout_key": str(dropout),
            "batch_digest": str(batch_digest),
            "has_sink": str(has_sink),
        }
        call = digest64(" ".join([RELEASE, str(plan_digest(plan)), *details.values()]))
        announced = _announced.get(self._group)
        if announced is not None and plan_digest(plan) in announced.plans:
            announced.calls = digest64(f"{announced.calls} {call}")
            if not announced.is_awaited:
                announced.is_awaited = True
                self._wait(announced.comparison, plan, details)
            return
        comparison = self._start(call, plan)
        if self._has_host_library and (self._device.type == "cpu" or not self._is_agreed):
            self._is_agreed = self._wait(comparison, plan, details)
        else:
            self._unread.append(comparison)

    def _wait(self, comparison: _Comparison, plan: Plan, details: Mapping[str, str]) -> bool:
        """Wait until all ranks take part, for WAIT_SECONDS; return False after that: it is read later, unless the
        messages of this call fail as well.

        Raises:
            ConfigError: ranks differ.
        """
        try:
            with timed_span(COMPARISON):
                comparison.wait(WAIT_SECONDS)
        except RuntimeError:
            self._unread.append(comparison)
            return False
        if _all_equal(comparison.digests):
            return True
        error = self._late_error(comparison)
        with suppress(PeerError):  # ranks that came long before this one have gone on
            compare_plans(plan, details, self._group, "cpu", WAIT_SECONDS)
        raise error

    def read_finished(self) -> None:
        """Read the comparisons of earlier calls that have finished; more than MAX_UNREAD are waited for.

        Raises:
            ConfigError: ranks ran different plans in one of these calls; names them.
            PeerError: a rank died.
        """
        while self._unread and (self._unread[0].is_finished() or len(self._unread) > MAX_UNREAD):
            comparison = self._unread.popleft()
            try:
                comparison.wait(self._timeout)
            except RuntimeError as error:
                raise PeerError(
                    f"rank {self._rank}: comparing plans over the group: a rank died, or did not take part: "
                    f"{failure_reason(error, self._timeout)}"
                ) from error
            if not _all_equal(comparison.digests):
                raise self._late_error(comparison)

    def _late_error(self, comparison: _Comparison) -> ConfigError:
        announced = _announced.pop(self._group, None)
        is_announced = announced is not None and announced.comparison is comparison
        ranks_by_digest: dict[int, list[int]] = {}
        for rank, digest in enumerate(comparison.digests.tolist()):
            ranks_by_digest.setdefault(digest, []).append(rank)
        groups = sorted(ranks_by_digest.values(), key=len)
        texts = [f"{name_ranks(ranks, 'has', 'have')} one" for ranks in groups]
        where = "micro-batch, or in the one before" if is_announced else "call of attention"
        return ConfigError(
            f"rank {self._rank}: ranks ran different plans in the same {where}: "
            f"{'; '.join(texts)}; this rank ran {comparison.call}; every rank "
            "calls attention with the same plans, types, dropout keys and batches in the same order, and runs the same "
            "release of mindspeed-cp (is a rank's data loader a batch ahead?)"
        )

    def _start(self, digest: int, plan: Plan) -> _Comparison:
        call = f"{plan.algorithm} over {plan.documents!r}"
        if not self._has_host_library:
            return self._start_on_device(digest, call)
        digests = torch.zeros(self._ranks, dtype=torch.int64)
        digests[self._rank] = digest
        # A sum of one-hot vectors: for gloo it takes a third of the time of its all-gather.
        work = dist.all_reduce(digests, group=self._group, async_op=True)
        return _Comparison(digests, work.is_completed, lambda limit: work.wait(timedelta(seconds=limit)), call)

    def _start_on_device(self, digest: int, call: str) -> _Comparison:
        own = torch.full((1,), digest, dtype=torch.int64, device=self._device)
        gathered = own.new_empty(self._ranks)
        work = _all_gather(gathered, own, group=self._group, async_op=True)
        module = torch.get_device_module(self._device)
        stream = _side_stream(self._device)
        with module.stream(stream):
            work.wait()  # of the side stream: neither the host nor the current stream waits
            digests = torch.empty(self._ranks, dtype=torch.int64, pin_memory=True)
            digests.copy_(gathered, non_blocking=True)
            event = module.Event()
            event.record(stream)
        return _Comparison(digests, event.query, lambda limit: event.synchronize(), call, (own, gathered))


#: torch.distributed.all_gather_single, or its older name, of which newer versions of torch warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.get_device_module(device).Stream(device)
    return _side_streams[device]


def _all_equal(digests: Tensor) -> bool:
    return len(set(digests.numpy().tolist())) == 1
