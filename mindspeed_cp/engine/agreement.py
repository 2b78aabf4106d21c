"""Compares what the ranks of a group run.

Ranks plan independently. A rank with another batch or other settings builds another plan; messages then fail to match,
which ends in a transport error, or, where their sizes happen to agree, in a wrong result.

`check_agreement` hashes every input of a plan to 64 bits (BLAKE2b), gathers the hashes, and gathers the values of each
rank where hashes differ. Every call of attention compares, always, 8 bytes per rank and call (`CallAgreement`): a
digest of the release of this package, the plan, the type of the tensors, the dropout key and, where one is given, the
digest of the batch is gathered before the first message of a call. How soon the result is read depends on the device::

    tensors on the CPU        the call waits for it: ranks that differ raise before a message travels
    device, group with gloo   a plan's first call waits; later calls go on, and read it in the backward or the next call
    device library alone      no call waits: the digests cross to the host on a stream of their own, and are read late

Where plans are announced (`CallAgreement.announce`), as Megatron models do at the start of a micro-batch, one sum
serves all its calls: the first one waits for it, which was under way while the model computed, and the next
announcement compares what the calls ran, with their types and dropout keys. A rank whose calls are not what it
announced itself is then found after its messages have travelled.

The backward of a call runs what its forward has compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp import __version__
from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, checked_timeout
from mindspeed_cp.comm.groups import comm_library, failure_reason, group_rank, group_size, has_library, resolve_group
from mindspeed_cp.engine.plan_cache import AnyPlan, kept_with_plan
from mindspeed_cp.engine.profile_ranges import profile_range
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.plan import AttentionConfig, Plan
from mindspeed_cp.plan.states import StateConfig, StatePlan
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.schema.numbers import check_type

RELEASE = __version__  # of this package on this rank: another one may plan otherwise
SHOWN_BYTES = 200  # of a value in an error
#: Seconds that a call waits for the comparison, whatever its time-out: then it goes on, since an error of its messages
#: names the rank that is missing. Ranks that differ come less far apart than this, also on a busy machine; a share of a
#: short time-out would let one of them go on before the others have come, and be told less.
WAIT_SECONDS = 30.0
MAX_UNREAD = 64  # comparisons of a group; with more, the oldest is waited for


def check_agreement(
    plan: Plan,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Raise ConfigError, on every rank, unless all ranks of the group have the same plan and type of tensors.

    A collective: every rank of the group must call it, in the same order as its other collectives. It gathers about
    150 bytes from each rank. The fingerprints of a plan are computed once and kept as long as the plan lives.

    Args:
        plan: the plan that this rank is about to run.
        dtype: type of this rank's q, k and v.
        group: context-parallel ranks; None for all processes.
        device: device of the tensors; its library carries the hashes.
        timeout: seconds to wait for other ranks, on gloo. NCCL and HCCL use the timeout of their group.

    Raises:
        ConfigError: ranks differ; names them and the difference: release of this package, documents, topology,
            attention, algorithm, layout, program or dtype.
        PeerError: a rank died or did not call it.
    """
    check_type("plan", plan, Plan, "a Plan, from build_plan")
    check_type("dtype", dtype, torch.dtype, "a torch.dtype, that of q")
    limit = checked_timeout(timeout)
    if group_size(group, "check_agreement") > 1:
        compare_plans(plan, {"dtype": str(dtype)}, group, device, limit)


def compare_plans(
    plan: AnyPlan,
    details: Mapping[str, str],
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    limit: float,
) -> None:
    """Raise ConfigError, on every rank, unless all ranks of the group run the same release of this package, and have
    the same plan and details; a collective.

    Args:
        plan: the plan of this rank.
        details: further values to compare, by name; every rank gives the same names.
        group, device: as for `check_agreement`.
        limit: seconds to wait for other ranks, on gloo.
    """
    # First the release alone: another one may describe plans by other names.
    releases = _differences_over(group, {"release": RELEASE}, device, limit)
    if releases:
        raise ConfigError(
            f"rank {group_rank(group)}: the ranks of the group run different releases of mindspeed-cp: {releases}; "
            "install the same one on every node"
        )
    differences = _differences_over(group, {**plan_fingerprints(plan), **details}, device, limit)
    if differences:
        raise ConfigError(
            f"rank {group_rank(group)}: the ranks of the group do not have the same plan: {differences}; every rank "
            "gives build_plan the same documents, topology, attention, algorithm and options, and q, k and v of one "
            "type and batch (is a rank's data loader a batch ahead?)"
        )


def _differences_over(
    group: dist.ProcessGroup | None, texts: Mapping[str, str], device: torch.device | str, limit: float
) -> str:
    """Compare named texts over a group and describe what differs, in the same words on all ranks; "" if nothing."""
    ranks = group_size(group)
    hashes = torch.tensor([digest64(text) for text in texts.values()], device=device)
    all_hashes = _all_gather(hashes, ranks, group, limit).cpu()
    if bool((all_hashes == all_hashes[0]).all()):
        return ""
    shown = torch.from_numpy(np.stack([_displayed(text) for text in texts.values()])).to(device)
    all_shown = _all_gather(shown, ranks, group, limit).cpu().numpy()
    return " | ".join(_differences(list(texts), all_hashes.numpy(), all_shown))


def _differences(names: Sequence[str], hashes: np.ndarray, texts: np.ndarray) -> list[str]:
    """Describe what differs between ranks: hashes [ranks, names], displayed values [ranks, names, SHOWN_BYTES]."""
    differing = [name for name, column in zip(names, hashes.T, strict=True) if (column != column[0]).any()]
    differences = []
    for name in _root_causes(differing):
        index = names.index(name)
        ranks_by_hash: dict[int, list[int]] = {}
        for rank, value_hash in enumerate(hashes[:, index].tolist()):
            ranks_by_hash.setdefault(value_hash, []).append(rank)
        values = [
            bytes(texts[ranks[0], index]).rstrip(b"\0").decode("utf-8", "ignore") for ranks in ranks_by_hash.values()
        ]
        if len(set(values)) < len(values):  # the displayed part is the same
            values = [
                f"{value} (#{value_hash % 2**32:08x})" for value, value_hash in zip(values, ranks_by_hash, strict=True)
            ]
        by_size = sorted(zip(ranks_by_hash.values(), values, strict=True), key=lambda pair: len(pair[0]))
        groups = [f"{name_ranks(ranks, 'has', 'have')} {value}" for ranks, value in by_size]
        differences.append(f"{name}: {'; '.join(groups)}")
    return differences


def plan_digest(plan: AnyPlan) -> int:
    """Return a 64-bit digest of a plan and all its inputs. The first call computes it; it is kept as long as the plan
    lives."""
    return kept_with_plan(plan, "digest", lambda: digest64("\0".join(plan_fingerprints(plan).values())))


def plan_fingerprints(plan: AnyPlan) -> Mapping[str, str]:
    """Return the inputs of a plan by name, each as complete text or as its beginning and a digest of the rest."""
    if isinstance(plan, StatePlan):
        return kept_with_plan(plan, "fingerprints", lambda: _fingerprints_of_states(plan))
    return kept_with_plan(plan, "fingerprints", lambda: _fingerprints(plan))


def _fingerprints(plan: Plan) -> dict[str, str]:
    return {
        "documents": _with_digest(repr(plan.documents), map(np.frombuffer, plan.documents.key, "bbb")),
        "kv_documents": _with_digest(repr(plan.kv_documents), map(np.frombuffer, plan.kv_documents.key, "bbb")),
        "topology": f"{plan.topology.nodes} nodes of {plan.topology.ranks_per_node} ranks",
        **{
            f"attention.{field.name}": repr(_as_python(getattr(plan.attention, field.name)))
            for field in fields(AttentionConfig)
        },
        "algorithm": " + ".join([plan.algorithm, *(part.algorithm for part in plan.parts)]),
        "reduce_dtype": plan.reduce_dtype,
        "layout": _with_digest(f"rows {plan.layout.token_counts.tolist()}", _layout_arrays(plan)),
        "program": _with_digest(
            f"{len(plan.step_order('forward'))} steps forward, {len(plan.step_order('backward'))} backward, "
            f"{sum(int(part.forward.fetch.items['rows'].sum()) for part in plan.parts_or_self)} rows sent",
            _program_arrays(plan),
        ),
    }


def _fingerprints_of_states(plan: StatePlan) -> dict[str, str]:
    layouts = (plan.layout.spans, plan.compute_layout.spans, plan.compute_layout.head_bounds(plan.state.heads))
    programs = [
        array
        for program in (plan.forward, plan.backward)
        for array in (program.messages, program.operations, program.results)
    ]
    return {
        "documents": _with_digest(repr(plan.documents), map(np.frombuffer, plan.documents.key, "bbb")),
        "topology": f"{plan.topology.nodes} nodes of {plan.topology.ranks_per_node} ranks",
        **{f"state.{field.name}": repr(_as_python(getattr(plan.state, field.name))) for field in fields(StateConfig)},
        "schedule": plan.schedule,
        "layout": _with_digest(f"rows {plan.layout.token_counts.tolist()}", layouts),
        "program": _with_digest(f"{plan.borders} borders", [plan.segments, *programs]),
    }


def _root_causes(names: Sequence[str]) -> Sequence[str]:
    """Remove differences that follow from others: layout and program follow from the inputs, the program from the
    layout."""
    inputs = [name for name in names if name not in ("layout", "program")]
    if set(inputs) - {"dtype", "dropout_key", "batch_digest", "has_sink"}:
        names = inputs
    if "layout" in names:
        names = [name for name in names if name != "program"]
    if "documents" in names and "kv_documents" in names:  # the same object except in cross-attention
        names = [name for name in names if name != "kv_documents"]
    if "documents" in names:  # another batch
        names = [name for name in names if name != "batch_digest"]
    return names


def _with_digest(text: str, arrays: Iterable[np.ndarray]) -> str:
    """Append a digest of arrays to a text, after the part that is displayed."""
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.descr}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{text}\0{digest.hexdigest()}"


def _layout_arrays(plan: Plan) -> Iterable[np.ndarray]:
    """Yield the arrays of all layouts, of the plan and of its parts."""
    for part in (plan, *plan.parts):
        yield part.documents.lengths
        for layout in (
            part.layout,
            part.kv_layout_in,
            part.q_layout_compute,
            part.kv_layout_compute,
            part.batch_layout,
        ):
            yield from (layout.spans, np.zeros(0) if layout.heads is None else layout.heads)


def _program_arrays(plan: Plan) -> Iterable[np.ndarray]:
    """Yield the arrays of all programs, and the order of the steps of all parts."""
    for part in plan.parts_or_self:
        for program in (part.forward, part.backward):
            yield from (np.array([program.steps]), program.capacity, program.contents, program.spans)
            for messages in (program.fetch, program.reduce):
                yield from (messages.items, messages.runs)
    yield from (np.array(plan.forward_order, np.int64), np.array(plan.backward_order, np.int64))


def _as_python(value: object) -> object:
    """Convert numbers of NumPy to those of Python, so that they print alike."""
    if isinstance(value, tuple):
        return tuple(map(_as_python, value))
    return value.item() if isinstance(value, np.generic) else value


def digest64(text: str) -> int:
    """Return a signed 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _displayed(text: str) -> np.ndarray:
    """Return the displayed part of a text, uint8 [SHOWN_BYTES]."""
    shown = text.split("\0")[0].encode()
    shown = shown if len(shown) <= SHOWN_BYTES else shown[: SHOWN_BYTES - 4] + b" ..."
    return np.frombuffer(shown.ljust(SHOWN_BYTES, b"\0"), np.uint8)


def _all_gather(tensor: Tensor, ranks: int, group: dist.ProcessGroup | None, limit: float) -> Tensor:
    """Gather the tensors of all ranks, [ranks, ...]."""
    gathered = [torch.empty_like(tensor) for _ in range(ranks)]
    try:
        work = dist.all_gather(gathered, tensor, group=group, async_op=True)
        is_gloo = comm_library(resolve_group(group), tensor.device) == "gloo"
        work.wait(timedelta(seconds=limit)) if is_gloo else work.wait()
    except RuntimeError as error:
        raise _lost_rank(group_rank(group), error, limit) from error
    return torch.stack(gathered)


def _lost_rank(rank: int, error: RuntimeError, limit: float) -> PeerError:
    return PeerError(
        f"rank {rank}: comparing plans over the group: a rank died, or did not take part: "
        f"{failure_reason(error, limit)}"
    )


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
        plan: AnyPlan,
        dtype: torch.dtype,
        dropout: DropoutKey | None = None,
        batch_digest: int | None = None,
        has_sink: bool = False,
        **further: object,
    ) -> None:
        """Compare this call with those of the other ranks, and read earlier comparisons that have finished; `further`
        are values of the call by name.

        Raises:
            ConfigError: ranks run different releases, plans, types, dropout keys, batches or further values; names
                ranks and differences if this call waits for the comparison, else the ranks.
        """
        self.read_finished()
        details = {
            "dtype": str(dtype),
            "dropout_key": str(dropout),
            "batch_digest": str(batch_digest),
            "has_sink": str(has_sink),
            **{name: str(value) for name, value in further.items()},
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

    def _wait(self, comparison: _Comparison, plan: AnyPlan, details: Mapping[str, str]) -> bool:
        """Wait until all ranks take part, for WAIT_SECONDS; return False after that: it is read later, unless the
        messages of this call fail as well.

        Raises:
            ConfigError: ranks differ.
        """
        try:
            with profile_range("compare plans"):
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
                raise _lost_rank(self._rank, error, self._timeout) from error
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

    def _start(self, digest: int, plan: AnyPlan) -> _Comparison:
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
        work = _all_gather_single(gathered, own, group=self._group, async_op=True)
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
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.get_device_module(device).Stream(device)
    return _side_streams[device]


def _all_equal(digests: Tensor) -> bool:
    return len(set(digests.numpy().tolist())) == 1
