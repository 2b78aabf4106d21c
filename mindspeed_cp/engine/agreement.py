"""Whether all ranks of a group are about to run the same plan.

Ranks plan by themselves. One whose batch is another one's, or whose settings are, makes another plan: messages that
do not match then end in a transport's error, or, where their sizes happen to be the same, in a wrong result. Here every
part of what makes a plan becomes a number of 64 bits (BLAKE2b), the numbers are gathered, and where some differ, each
rank's values are gathered too.
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

from mindspeed_cp.comm import DEFAULT_TIMEOUT, checked_timeout, existing_group, group_rank, group_size, library_of
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.layout import Layout
from mindspeed_cp.plan import AttentionConfig, Messages, Plan, Program

TEXT = 200  # bytes of a value in an error


def check_agreement(
    plan: Plan,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Raise ConfigError, on every rank, unless all ranks of the group have the same plan and type of tensors.

    A collective: every rank of the group calls it, in the same order as its other collectives. It gathers some 150
    bytes of each rank. What is said of a plan is derived once, and kept as long as the plan lives.

    Args:
        plan: that this rank is about to run.
        dtype: of this rank's q, k and v.
        group: the context-parallel ranks; None for all processes.
        device: of the tensors; its library carries the numbers.
        timeout: seconds until ranks that do not call it are given up, on gloo. NCCL and HCCL use the time-out of their
            group.

    Raises:
        ConfigError: ranks differ; names them, and in what: documents, topology, attention, algorithm, what its options
            decide, dtype.
        PeerError: a rank died, or did not call it.
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
    said = {**_parts(plan), "dtype": str(dtype)}
    numbers = torch.tensor([_number(text) for text in said.values()], device=device)
    everyone = _gathered(numbers, ranks, group, limit).cpu()
    if bool((everyone == everyone[0]).all()):
        return
    shown = torch.from_numpy(np.stack([_shown(text) for text in said.values()])).to(device)
    texts = _gathered(shown, ranks, group, limit).cpu().numpy()
    names = _causes([name for name, column in zip(said, everyone.T, strict=True) if bool((column != column[0]).any())])
    differences = []
    for name in names:
        at = list(said).index(name)
        groups: dict[int, list[int]] = {}
        for rank, number in enumerate(everyone[:, at].tolist()):
            groups.setdefault(number, []).append(rank)
        values = [bytes(texts[of[0], at]).rstrip(b"\0").decode("utf-8", "ignore") for of in groups.values()]
        if len(set(values)) < len(values):  # alike as far as they are shown
            values = [f"{value} (#{number % 2**32:08x})" for value, number in zip(values, groups, strict=True)]
        by_size = sorted(zip(groups.values(), values, strict=True), key=lambda one: len(one[0]))
        differences.append(f"{name}: {'; '.join(f'{_ranks(of)} {value}' for of, value in by_size)}")
    raise ConfigError(
        f"rank {group_rank(group)}: the ranks of the group do not have the same plan: {' | '.join(differences)}; every "
        "rank gives build_plan the same documents, topology, attention, algorithm and options, and q, k and v of one "
        "type (is a rank's data loader a batch ahead?)"
    )


_known: WeakKeyDictionary[Plan, dict[str, str]] = WeakKeyDictionary()


def _parts(plan: Plan) -> Mapping[str, str]:
    """What makes a plan, by name: as text that says everything, or its beginning and a digest of the rest."""
    found = _known.get(plan)
    if found is None:
        found = {
            "documents": _with_digest(repr(plan.documents), [plan.documents.lengths]),
            "kv_documents": _with_digest(repr(plan.kv_documents), [plan.kv_documents.lengths]),
            "topology": f"{plan.topology.nodes} nodes of {plan.topology.ranks_per_node} ranks",
            **{
                f"attention.{field.name}": repr(_plain(getattr(plan.attention, field.name)))
                for field in fields(AttentionConfig)
            },
            "algorithm": " + ".join([plan.algorithm, *(part.algorithm for part in plan.parts)]),
            "layout": _with_digest(f"rows {plan.layout.token_counts.tolist()}", _layouts(plan)),
            "program": _with_digest(
                f"{len(plan.turns('forward'))} steps forward, {len(plan.turns('backward'))} backward, "
                f"{sum(int(piece.forward.fetch.items['rows'].sum()) for piece in plan.pieces)} rows sent",
                _programs(plan),
            ),
        }
        _known[plan] = found
    return found


def _causes(names: Sequence[str]) -> Sequence[str]:
    """Without what only follows from other differences: layout and program follow from all that is given, the program
    from the layout."""
    given = [name for name in names if name not in ("layout", "program")]
    if [name for name in given if name != "dtype"]:
        names = given
    if "layout" in names:
        names = [name for name in names if name != "program"]
    if "documents" in names and "kv_documents" in names:  # one and the same, but in cross-attention
        names = [name for name in names if name != "kv_documents"]
    return names


def _with_digest(text: str, arrays: Iterable[np.ndarray]) -> str:
    """Text, then, beyond what is shown of it, a digest of arrays."""
    digest = blake2b(digest_size=16)
    for one in arrays:
        digest.update(f"{one.dtype.descr}{one.shape}".encode())
        digest.update(np.ascontiguousarray(one).tobytes())
    return f"{text}\0{digest.hexdigest()}"


def _layouts(plan: Plan) -> Iterable[np.ndarray]:
    """Everything of who holds what, of the whole and of its parts."""
    for one in (plan, *plan.parts):
        yield one.documents.lengths
        for layout in (one.layout, one.layout_kv, one.q_layout, one.kv_layout, one.linear or one.layout):
            yield from _layout(layout)


def _programs(plan: Plan) -> Iterable[np.ndarray]:
    """All steps, messages and contents, and the order of the parts' steps."""
    for piece in plan.pieces:
        yield from (*_program(piece.forward), *_program(piece.backward))
    yield from (np.array(plan.order, np.int64), np.array(plan.order_backward, np.int64))


def _layout(layout: Layout) -> tuple[np.ndarray, ...]:
    return layout.spans, np.zeros(0) if layout.heads is None else layout.heads


def _program(program: Program) -> Iterable[np.ndarray]:
    yield from (np.array([program.steps]), program.capacity, program.contents, program.spans)
    yield from (*_messages(program.fetch), *_messages(program.reduce))


def _messages(messages: Messages) -> tuple[np.ndarray, np.ndarray]:
    return messages.items, messages.runs


def _plain(value: object) -> object:
    """NumPy's numbers as Python's, which print alike."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _number(text: str) -> int:
    """64 bits of a text, signed."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _shown(text: str) -> np.ndarray:
    """The part of a text that people read, uint8 [TEXT]."""
    part = text.split("\0")[0].encode()
    part = part if len(part) <= TEXT else part[: TEXT - 4] + b" ..."
    return np.frombuffer(part.ljust(TEXT, b"\0"), np.uint8)


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3 has", "ranks 0, 1, 2 and 9 more have"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"


def _gathered(mine: Tensor, ranks: int, group: dist.ProcessGroup | None, limit: float) -> Tensor:
    """Every rank's tensor, [ranks, ...]."""
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    try:
        work = dist.all_gather(everyone, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=limit)) if library_of(existing_group(group), mine.device) == "gloo" else work.wait()
    except RuntimeError as error:
        raise PeerError(
            f"rank {group_rank(group)}: comparing plans over the group: a rank died, or did not take part within "
            f"{limit:g} s ({' '.join(str(error).split())[:160]})"
        ) from error
    return torch.stack(everyone)
