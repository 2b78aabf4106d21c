"""A canary of attention: a few queries of one head are computed again by the fp64 reference, and compared.

The forward and the backward only copy what the comparison needs: the rows of the queries on the rank that holds them,
and on every rank the keys and values of one head that these queries see. After the step they are gathered over the
CPU's own library, and the reference runs on the CPU of the rank that holds the queries: a device, kernel, message or
merge that computes wrong has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm import DEFAULT_TIMEOUT, GroupTransport, Transfer, has_library, resolve_group
from mindspeed_cp.engine.canary_tile import Forward, explain
from mindspeed_cp.engine.sample_reference import SampleReference
from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.latent import LatentExpansion
from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.sample import AttentionSample, draw_sample

#: Largest difference of a query's row from the reference, relative to what rounding scales with; several times what
#: kernels that round attention weights to the type of q have.
TOLERANCE = {torch.float32: 2.0**-13, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}
SCORE_ERROR = 2.0**-22  # of a score in fp32, relative to its largest possible value: the weights are exp(score)


@dataclass
class _Taken:
    """Copies of a call's tensors: the queries' rows on their rank, the keys' on every rank."""

    sample: AttentionSample
    plan: Plan
    rank: int
    dropout_key: DropoutKey | None
    kv: Tensor
    dtype: torch.dtype
    sink: Tensor | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)


class AttentionCanary:
    """Watches one layer in one micro-batch; every context-parallel rank makes one from the same numbers.

    Args:
        layers: number of layers.
        seed: numbers that choose layer, micro-batch, head and queries.
        timeout: seconds to wait for a rank when keys and values are gathered.

    Attributes:
        layer: number of the layer, from 1.
    """

    def __init__(self, layers: int, seed: tuple[int, ...], timeout: float = DEFAULT_TIMEOUT) -> None:
        self._timeout = timeout
        self._generator = np.random.default_rng(seed)
        self.layer = 1 + int(self._generator.integers(layers))
        self._micro_batch = int(self._generator.integers(2**31))
        self._taken: _Taken | None = None
        self._hooked = False

    def watches(self, micro_batch: int, count: int) -> bool:
        """Return True for the micro-batch to watch, given its number, from 0, and how many there are."""
        return micro_batch == self._micro_batch % count

    def observe(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        plan: Plan,
        rank: int,
        dropout_key: DropoutKey | None,
        sink: Tensor | None = None,
        kv_up: Tensor | None = None,
    ) -> None:
        """Copy what the comparison needs of the first call; of the first call with gradients, those of the queries.

        Activation recomputation calls again: the first call is then the one without gradients.

        Args:
            q, k, v, out: arguments and result of context_parallel_attention on this rank.
            plan, dropout_key, sink, kv_up: as given to it; no key where nothing is dropped.
            rank: context-parallel rank.
        """
        if self._taken is None:
            sample = draw_sample(plan, self._generator)
            if sample is None:
                return
            rows, kv_head = _as_index(sample.key_rows(plan, rank)[0], k.device), sample.kv_head
            k, v = k[rows].detach(), v[rows].detach()
            if kv_up is not None:
                k, v = LatentExpansion(kv_up, plan.attention, (sample.head, sample.head + 1)).expand(k, v)
                kv_head = 0
            kv = torch.cat([k[:, kv_head], v[:, kv_head]], 1)
            of_head = None if sink is None else sink[sample.head].detach().clone()
            self._taken = _Taken(sample, plan, rank, dropout_key, kv, q.dtype, of_head)
            if rank == sample.rank:
                self._take("q", q)
                self._take("out", out)
        if rank == self._taken.sample.rank and not self._hooked and out.requires_grad and q.requires_grad:
            self._hooked = True
            out.register_hook(lambda gradient: self._take("dout", gradient))
            q.register_hook(lambda gradient: self._take("dq", gradient))

    @property
    def has_observed(self) -> bool:
        """True between the first call of the layer and the comparison."""
        return self._taken is not None

    def _take(self, name: str, x: Tensor) -> None:
        if self._taken is None:  # a backward after the comparison
            return
        sample = self._taken.sample
        self._taken.rows[name] = x[sample.row : sample.row + sample.rows, sample.head].detach().clone()

    def check(self, group: dist.ProcessGroup | None) -> str | None:
        """Compare with the reference, after the backward; a collective of the context-parallel ranks.

        Args:
            group: context-parallel ranks; None without torch.distributed. Tensors travel over the default group if it
                has a library for the CPU, else over this one.

        Returns:
            What is wrong, on the rank that holds the queries; None on all others, and if nothing is wrong.

        Raises:
            PeerError: a rank died or did not answer.
        """
        taken, self._taken = self._taken, None
        if taken is None:  # a batch without tokens
            return None
        ranks = list(range(taken.plan.ranks)) if group is None else dist.get_process_group_ranks(group)
        shards = _gather(taken, ranks, group, self._timeout)
        return None if shards is None else _compare(taken, shards, ranks, self.layer)


def check_all_ranks(canaries: Sequence[AttentionCanary]) -> str | None:
    """Return what AttentionCanary.check returns on the rank of the queries, for the canaries of all ranks of a plan in
    one process."""
    taken = [canary._taken for canary in canaries]
    if taken[0] is None:
        return None
    shards = {rank: x.kv for rank, x in enumerate(taken) if x is not None and len(x.kv)}
    owner = taken[taken[0].sample.rank]
    assert owner is not None
    return _compare(owner, shards, range(len(taken)), canaries[0].layer)


def _gather(
    taken: _Taken, ranks: Sequence[int], group: dist.ProcessGroup | None, timeout: float
) -> dict[int, Tensor] | None:
    """Return the sample's keys and values by context-parallel rank on the rank of the queries, None on the others.

    Args:
        taken: copies of this rank.
        ranks: global rank of each context-parallel rank.
        group: context-parallel ranks.
        timeout: seconds to wait for a rank.
    """
    plan, sample, own = taken.plan, taken.sample, taken.kv
    if plan.ranks == 1:
        return {0: own.cpu()}
    if has_library(resolve_group(None), "cpu"):
        own, group = own.cpu(), None
    else:
        own, ranks = own.contiguous(), range(plan.ranks)
    transport, label = GroupTransport(group, timeout, own.device), "keys and values for the canary of attention"
    if taken.rank != sample.rank:
        transfers = [Transfer(own, ranks[sample.rank], True, 0, label)] if len(own) else []
    else:
        counts = {rank: len(sample.key_rows(plan, rank)[1]) for rank in range(plan.ranks) if rank != taken.rank}
        shards = {rank: own.new_empty(count, own.shape[1]) for rank, count in counts.items() if count}
        transfers = [Transfer(x, ranks[rank], False, 0, label) for rank, x in shards.items()]
    for pending in transport.post(transfers):
        pending.wait()
    return {**shards, taken.rank: own} if taken.rank == sample.rank else None


def _as_index(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    """Return row numbers as a slice if they are one run, as outside trees they are, else as a tensor."""
    if not len(rows) or rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
    return torch.from_numpy(rows).to(device)


def _compare(taken: _Taken, shards: Mapping[int, Tensor], ranks: Sequence[int], layer: int) -> str | None:
    """Return what is wrong, or None.

    Args:
        taken: copies of the rank of the queries.
        shards: keys and values of each context-parallel rank that has some, [rows, head_dim + head_dim_v].
        ranks: global rank of each context-parallel rank.
        layer: number of the layer, for the text.

    Rounding errors of kernels are random in every key, so they scale with the norm of the sum over keys with random
    signs: sqrt(sum of squares), for out of weight x value and for dq of the score's gradient x key. More channels of k
    and v, which no score depends on, carry keys and values with such signs through the same reference.
    """
    plan, sample = taken.plan, taken.sample
    rows = {name: x.cpu().double() for name, x in taken.rows.items()}
    kv = torch.empty(sample.keys, plan.attention.head_dim + plan.attention.head_dim_v, dtype=torch.float64)
    for rank, shard in shards.items():
        kv[torch.from_numpy(sample.key_rows(plan, rank)[1])] = shard.cpu().double()
    k, v = kv.split([plan.attention.head_dim, plan.attention.head_dim_v], 1)
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (len(kv), 1)))
    sink = None if taken.sink is None else taken.sink.cpu()
    reference = SampleReference(plan, sample, taken.dropout_key, sink)
    with torch.enable_grad():
        query = torch.cat([rows["q"], torch.zeros_like(rows["q"])], 1).requires_grad_()
        values = torch.cat([v, v * signs, k], 1)
        result, lse = reference.attend(query, torch.cat([k, k * signs], 1), values)
        out, out_noise, mean_key = result.split([v.shape[1], v.shape[1], k.shape[1]], 1)
        dq_all = torch.autograd.grad(out, query, rows["dout"])[0] if rows.keys() >= {"dout", "dq"} else None
    out, out_noise, mean_key = out.detach(), out_noise.detach(), mean_key.detach()
    norm = torch.linalg.vector_norm
    scale = plan.attention.softmax_scale
    largest_score = scale * norm(rows["q"], dim=1) * (norm(k, dim=1).max() if len(k) else 0.0)
    tolerance = TOLERANCE.get(taken.dtype, TOLERANCE[torch.float32]) + SCORE_ERROR * largest_score
    checks = [("the output", out, rows["out"], norm(out, dim=1) + norm(out_noise, dim=1))]
    if dq_all is not None:
        dq, dq_noise = dq_all.chunk(2, 1)
        rounded_output = scale * norm(rows["dout"] * out, dim=1) * norm(mean_key, dim=1)
        checks.append(("the gradient of q", dq, rows["dq"], norm(dq, dim=1) + norm(dq_noise, dim=1) + rounded_output))
    for name, right, computed, size in checks:
        difference = norm(computed - right, dim=1)
        finite = right.isfinite().all(1)  # else the inputs are at fault, not attention
        wrong = finite & ~(difference <= tolerance * size)
        if not wrong.any():
            continue
        forward = Forward(rows["q"], k, v, out, lse.detach(), rows["out"]) if name == "the output" else None
        place = explain(reference, wrong.numpy(), ranks, forward)
        worst = float((difference / size.clamp(min=1e-300))[wrong].max())
        by = "is NaN" if np.isnan(worst) else f"differs from the fp64 reference by {worst:.1e} of its size"
        rounding = f"rounding of {str(taken.dtype)[6:]} explains {float(tolerance[wrong].min()):.1e}"
        head = plan.attention.first_head + sample.head
        return f"attention of layer {layer}, head {head}: {name} of {place} {by}, and {rounding}"
    return None
