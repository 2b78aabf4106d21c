"""Checks that all ranks of a group are about to run the same plan.

Ranks plan independently. A rank with another batch or other settings builds another plan; messages then fail to match,
which ends in a transport error, or, where their sizes happen to agree, in a wrong result. The check hashes every input
of a plan to 64 bits (BLAKE2b), gathers the hashes, and gathers the values of each rank where hashes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp import __version__
from mindspeed_cp.comm import (
    DEFAULT_TIMEOUT,
    checked_timeout,
    comm_library,
    failure_reason,
    group_rank,
    group_size,
    resolve_group,
)
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import AttentionConfig, Messages, Plan, Program
from mindspeed_cp.schema.messages import name_ranks

RELEASE = __version__  # of this package on this rank: another one may plan otherwise
SHOWN_BYTES = 200  # of a value in an error


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
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan is {plan!r}; valid: a Plan, from build_plan")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; valid: a torch.dtype, that of q")
    limit, ranks = checked_timeout(timeout), group_size(group)
    if ranks < 0:
        raise ConfigError("this process is not in the group; only the group's own ranks call check_agreement")
    if ranks == 1:
        return
    compare_plans(plan, {"dtype": str(dtype)}, group, device, limit)


def compare_plans(
    plan: Plan,
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


_cache: WeakKeyDictionary[Plan, dict[str, str]] = WeakKeyDictionary()
_digests: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()


def plan_digest(plan: Plan) -> int:
    """Return a 64-bit digest of a plan and all its inputs. The first call computes it; it is kept as long as the plan
    lives."""
    digest = _digests.get(plan)
    if digest is None:
        digest = _digests[plan] = digest64("\0".join(plan_fingerprints(plan).values()))
    return digest


def plan_fingerprints(plan: Plan) -> Mapping[str, str]:
    """Return the inputs of a plan by name, each as complete text or as its beginning and a digest of the rest."""
    fingerprints = _cache.get(plan)
    if fingerprints is None:
        fingerprints = {
            "documents": _with_digest(repr(plan.documents), map(np.frombuffer, plan.documents.key, "bbb")),
            "kv_documents": _with_digest(repr(plan.kv_documents), map(np.frombuffer, plan.kv_documents.key, "bbb")),
            "topology": f"{plan.topology.nodes} nodes of {plan.topology.ranks_per_node} ranks",
            **{
                f"attention.{field.name}": repr(_as_python(getattr(plan.attention, field.name)))
                for field in fields(AttentionConfig)
            },
            "algorithm": " + ".join([plan.algorithm, *(part.algorithm for part in plan.parts)]),
            "reduce_dtype": plan.reduce_dtype,
            "layout": _with_digest(f"rows {plan.layout.token_counts.tolist()}", _layouts(plan)),
            "program": _with_digest(
                f"{len(plan.step_order('forward'))} steps forward, {len(plan.step_order('backward'))} backward, "
                f"{sum(int(part.forward.fetch.items['rows'].sum()) for part in plan.parts_or_self)} rows sent",
                _programs(plan),
            ),
        }
        _cache[plan] = fingerprints
    return fingerprints


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


def _layouts(plan: Plan) -> Iterable[np.ndarray]:
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
            yield from _layout(layout)


def _programs(plan: Plan) -> Iterable[np.ndarray]:
    """Yield the arrays of all programs, and the order of the steps of all parts."""
    for part in plan.parts_or_self:
        yield from (*_program(part.forward), *_program(part.backward))
    yield from (np.array(plan.forward_order, np.int64), np.array(plan.backward_order, np.int64))


def _layout(layout: Layout) -> tuple[np.ndarray, ...]:
    return layout.spans, np.zeros(0) if layout.heads is None else layout.heads


def _program(program: Program) -> Iterable[np.ndarray]:
    yield from (np.array([program.steps]), program.capacity, program.contents, program.spans)
    yield from (*_messages(program.fetch), *_messages(program.reduce))


def _messages(messages: Messages) -> tuple[np.ndarray, np.ndarray]:
    return messages.items, messages.runs


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
        raise PeerError(
            f"rank {group_rank(group)}: comparing plans over the group: a rank died, or did not take part: "
            f"{failure_reason(error, limit)}"
        ) from error
    return torch.stack(gathered)
