"""Compares a few rows of attention with the fp64 reference while a model trains: it tells that a kernel computes wrong.

    check = AttentionCheck(layers=32, seed=(1234, step))       # equal on all ranks; draws layer, head and queries
    ...
    out = context_parallel_attention(q, k, v, plan, group)     # in layer `check.layer`
    check.observe(q, k, v, out, plan, rank)
    ...                                                        # backward
    problem = check.compare(group)                             # None, or one line on the rank that holds the queries

The forward and the backward only copy what the comparison needs: the rows of the queries on the rank that holds them,
and on every rank the keys and values of one head that these queries see. They are then gathered over the CPU's own
library, and the reference runs on the CPU of the rank that holds the queries: a device, kernel, message or merge that
computes wrong has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp.comm.group_transport import DEFAULT_TIMEOUT, GroupTransport, Transfer
from mindspeed_cp.comm.groups import group_rank, has_library, resolve_group
from mindspeed_cp.comm.redistribution import as_row_index
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.layout import ragged_arange
from mindspeed_cp.ops.attention.contract import DropoutKey
from mindspeed_cp.ops.attention.latent import LatentExpansion
from mindspeed_cp.ops.attention.reference import dense_attention
from mindspeed_cp.ops.dropout import keep_mask
from mindspeed_cp.plan import Plan

#: Largest difference of a query's row from the reference, relative to what rounding scales with; several times what
#: kernels that round attention weights to the type of q have.
TOLERANCE = {torch.float32: 2.0**-13, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}
SCORE_ERROR = 2.0**-22  # of a score in fp32, relative to its largest possible value: the weights are exp(score)

QUERIES = 16  # most queries of a sample
PAIRS = 2**16  # most pairs of a query and a key, unless one query sees more


@dataclass(frozen=True)
class AttentionSample:
    """Some queries of one head, neighbours in a document and on a rank, and the keys that any of them sees.

    Attributes:
        head, kv_head: the query head and the kv head that it reads.
        rank: rank that holds the queries in plan.layout.
        row, rows: first row and number of the queries there.
        document: number of the document.
        position: position of the first query, in a tree on the path from the root.
        first_key, keys: position of the first key, and number of keys; in a tree on the document's path.
    """

    head: int
    kv_head: int
    rank: int
    row: int
    rows: int
    document: int
    position: int
    first_key: int
    keys: int

    def key_rows(self, plan: Plan, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys that a rank holds in plan.kv_layout_in: their rows, and positions after first_key, int64
        [rows] each."""
        keys, tokens = plan.kv_documents, plan.kv_layout_in.tokens(rank)
        number = np.full(len(tokens), -1)
        _, path = keys.seen_documents(np.array([self.document]))
        for doc in path.tolist():
            begin, end = keys.offsets[doc : doc + 2]
            position = tokens - begin + keys.first_positions[doc] - self.first_key
            is_key = (tokens >= begin) & (tokens < end) & (position >= 0) & (position < self.keys)
            number[is_key] = position[is_key]
        rows = np.flatnonzero(number >= 0)
        return rows, number[rows]

    def blocks(self, plan: Plan) -> tuple[Tensor, Tensor] | None:
        """Return the block of each query and of each key, or -1, int64 [rows] and [keys]; None if the plan has none."""
        documents = plan.documents
        if documents.blocks is None:
            return None
        _, path = documents.seen_documents(np.array([self.document]))
        block = torch.from_numpy(documents.blocks.of(ragged_arange(documents.offsets[path], documents.lengths[path])))
        return block[self.position : self.position + self.rows], block[self.first_key : self.first_key + self.keys]

    def computing_ranks(self, plan: Plan) -> np.ndarray:
        """Return the rank that computes each query, int64 [rows]: under Ulysses not the one that holds it."""
        part = next(part for part in plan.parts_or_self if part.documents.lengths[self.document])
        layout = part.q_layout_compute
        bounds = layout.head_bounds(plan.attention.heads)[layout.spans["rank"]]
        spans = layout.spans[(bounds[:, 0] <= self.head) & (self.head < bounds[:, 1])]
        first = part.documents.offsets[self.document] - part.documents.first_positions[self.document]
        tokens = first + self.position + np.arange(self.rows)[:, None]
        return spans["rank"][((spans["start"] <= tokens) & (tokens < spans["stop"])).argmax(1)]


def draw_sample(plan: Plan, generator: np.random.Generator) -> AttentionSample | None:
    """Draw a head and a token, and take the queries from that token on; None if the batch has no tokens. Every rank
    draws the same with an equal generator."""
    attention, documents = plan.attention, plan.documents
    if not documents.tokens:
        return None
    head, token = int(generator.integers(attention.heads)), int(generator.integers(documents.tokens))
    spans = plan.layout.spans
    index = int(np.flatnonzero((spans["start"] <= token) & (token < spans["stop"]))[0])
    document = int(spans["doc"][index])
    position = token - int(documents.offsets[document]) + int(documents.first_positions[document])
    rows = min(QUERIES, int(spans["stop"][index]) - token)
    while rows > 1 and rows * _visible_keys(plan, token, position, rows)[1] > PAIRS:
        rows -= 1
    first_key, keys = _visible_keys(plan, token, position, rows)
    return AttentionSample(
        head=head,
        kv_head=head * attention.kv_heads // attention.heads,
        rank=int(spans["rank"][index]),
        row=int(plan.layout.span_first_rows[index]) + token - int(spans["start"][index]),
        rows=rows,
        document=document,
        position=position,
        first_key=first_key,
        keys=keys,
    )


def _visible_keys(plan: Plan, token: int, position: int, rows: int) -> tuple[int, int]:
    """Return the position of the first key and the number of keys that `rows` queries from a token on see."""
    left, right = plan.attention.visible_range
    documents, blocks = plan.kv_documents, plan.documents.blocks
    document = int(plan.documents.document_of(np.asarray(token)))
    length = int(documents.first_positions[document] + documents.lengths[document])
    first, last = max(0, position - left), min(length, position + rows + right)
    if blocks is not None:
        of_ends = blocks.of(np.array([token, token + rows - 1]))
        if of_ends[0] >= 0:
            first = min(first, position + int(blocks.start[of_ends[0]]) - token)
        if of_ends[1] >= 0:
            last = position + int(blocks.stop[of_ends[1]]) - token
    return first, max(0, last - first)


@dataclass
class _Observed:
    """Copies of a call's tensors: the queries' rows on their rank, the keys' on every rank."""

    sample: AttentionSample
    plan: Plan
    rank: int
    dropout_key: DropoutKey | None
    kv: Tensor
    dtype: torch.dtype
    sink: Tensor | None = None
    rows: dict[str, Tensor] = field(default_factory=dict)


class AttentionCheck:
    """The comparison of one layer in one micro-batch; every context-parallel rank makes one from the same numbers.

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
        self._observed: _Observed | None = None
        self._has_hooks = False

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
        dropout_key: DropoutKey | None = None,
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
        if self._observed is None:
            sample = draw_sample(plan, self._generator)
            if sample is None:
                return
            numbers, kv_head = sample.key_rows(plan, rank)[0], sample.kv_head
            rows = as_row_index(numbers, np.ones_like(numbers), k.device)
            k, v = k[rows].detach(), v[rows].detach()
            if kv_up is not None:
                k, v = LatentExpansion(kv_up, plan.attention, (sample.head, sample.head + 1)).expand(k, v)
                kv_head = 0
            kv = torch.cat([k[:, kv_head], v[:, kv_head]], 1)
            of_head = None if sink is None else sink[sample.head].detach().clone()
            self._observed = _Observed(sample, plan, rank, dropout_key, kv, q.dtype, of_head)
            if rank == sample.rank:
                self._copy("q", q)
                self._copy("out", out)
        if rank == self._observed.sample.rank and not self._has_hooks and out.requires_grad and q.requires_grad:
            self._has_hooks = True
            out.register_hook(lambda gradient: self._copy("dout", gradient))
            q.register_hook(lambda gradient: self._copy("dq", gradient))

    @property
    def has_observed(self) -> bool:
        """True between the first call of the layer and the comparison."""
        return self._observed is not None

    def _copy(self, name: str, x: Tensor) -> None:
        if self._observed is None:  # a backward after the comparison
            return
        sample = self._observed.sample
        self._observed.rows[name] = x[sample.row : sample.row + sample.rows, sample.head].detach().clone()

    def compare(self, group: dist.ProcessGroup | None) -> str | None:
        """Compare with the reference, after the backward; a collective of the context-parallel ranks.

        Args:
            group: context-parallel ranks; None without torch.distributed. Tensors travel over the default group if it
                has a library for the CPU, else over this one.

        Returns:
            What is wrong, with layer, head, rows and rank, on the rank that holds the queries; None on all others, and
            if nothing is wrong.

        Raises:
            PeerError: a rank died or did not answer.
        """
        observed, self._observed = self._observed, None
        if observed is None:  # a batch without tokens
            return None
        ranks = list(range(observed.plan.ranks)) if group is None else dist.get_process_group_ranks(group)
        shards = _gather(observed, ranks, group, self._timeout)
        return None if shards is None else _difference(observed, shards, ranks, self.layer)

    def compare_in_backward(self, q: Tensor, group: dist.ProcessGroup | None, where: str = "") -> None:
        """Compare as soon as the backward has the gradient of q, or at once if q needs none; every rank calls it after
        :meth:`observe`. The error comes out of `backward()` before any weight changes.

        Args:
            q: as given to `observe`.
            group: as for :meth:`compare`.
            where: begins the error's text, such as "batch 300: ".

        Raises:
            CorruptionError: attention is wrong; raised on the rank that holds the queries.
            PeerError: a rank died or did not answer.
        """

        def compare(_: Tensor | None = None) -> None:
            problem = self.compare(resolve_group(group) if dist.is_available() and dist.is_initialized() else None)
            if problem is not None:
                raise CorruptionError(f"{where}{problem}; if it happens again on that rank, take its device out")

        if q.requires_grad:
            q.register_hook(compare)
        elif torch.is_grad_enabled():  # else recomputation calls again
            compare()


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    seed: int = 0,
    dropout_key: DropoutKey | None = None,
    sink: Tensor | None = None,
    kv_up: Tensor | None = None,
) -> None:
    """Compare a result of :func:`mindspeed_cp.context_parallel_attention` with the fp64 reference in some rows of a
    head; every rank of the group calls it.

    Args:
        q, k, v, plan, group, dropout_key, sink, kv_up: as given to that function; no key where nothing is dropped.
        out: what it returned.
        seed: draws head and queries, the same on all ranks.

    Raises:
        CorruptionError: the rows differ by more than rounding; raised on the rank that holds them.
        PeerError: a rank died or did not answer.
    """
    check = AttentionCheck(1, (seed,))
    check.observe(q, k, v, out, plan, group_rank(group), dropout_key, sink, kv_up)
    check.compare_in_backward(q.detach(), group)


def _gather(
    observed: _Observed, ranks: Sequence[int], group: dist.ProcessGroup | None, timeout: float
) -> dict[int, Tensor] | None:
    """Return the sample's keys and values by context-parallel rank on the rank of the queries, None on the others.

    Args:
        observed: copies of this rank.
        ranks: global rank of each context-parallel rank.
        group: context-parallel ranks.
        timeout: seconds to wait for a rank.
    """
    plan, sample, own = observed.plan, observed.sample, observed.kv
    if plan.ranks == 1:
        return {0: own.cpu()}
    if has_library(resolve_group(None), "cpu"):
        own, group = own.cpu(), None
    else:
        own, ranks = own.contiguous(), range(plan.ranks)
    transport, label = GroupTransport(group, timeout, own.device), "keys and values for the check of attention"
    if observed.rank != sample.rank:
        transfers = [Transfer(own, ranks[sample.rank], True, 0, label)] if len(own) else []
    else:
        counts = {rank: len(sample.key_rows(plan, rank)[1]) for rank in range(plan.ranks) if rank != observed.rank}
        shards = {rank: own.new_empty(count, own.shape[1]) for rank, count in counts.items() if count}
        transfers = [Transfer(x, ranks[rank], False, 0, label) for rank, x in shards.items()]
    for pending in transport.post(transfers):
        pending.wait()
    return {**shards, observed.rank: own} if observed.rank == sample.rank else None


def _difference(observed: _Observed, shards: Mapping[int, Tensor], ranks: Sequence[int], layer: int) -> str | None:
    """Return what is wrong, or None.

    Args:
        observed: copies of the rank of the queries.
        shards: keys and values of each context-parallel rank that has some, [rows, head_dim + head_dim_v].
        ranks: global rank of each context-parallel rank.
        layer: number of the layer, for the text.

    Rounding errors of kernels are random in every key, so they scale with the norm of the sum over keys with random
    signs: sqrt(sum of squares), for out of weight x value and for dq of the score's gradient x key. More channels of k
    and v, which no score depends on, carry keys and values with such signs through the same reference.
    """
    plan, sample = observed.plan, observed.sample
    rows = {name: x.cpu().double() for name, x in observed.rows.items()}
    kv = torch.empty(sample.keys, plan.attention.head_dim + plan.attention.head_dim_v, dtype=torch.float64)
    for rank, shard in shards.items():
        kv[torch.from_numpy(sample.key_rows(plan, rank)[1])] = shard.cpu().double()
    k, v = kv.split([plan.attention.head_dim, plan.attention.head_dim_v], 1)
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (len(kv), 1)))
    with torch.enable_grad():
        query = torch.cat([rows["q"], torch.zeros_like(rows["q"])], 1).requires_grad_()
        result = _reference(observed, query, torch.cat([k, k * signs], 1), torch.cat([v, v * signs, k], 1))
        out, out_noise, mean_key = result.split([v.shape[1], v.shape[1], k.shape[1]], 1)
        dq_all = torch.autograd.grad(out, query, rows["dout"])[0] if rows.keys() >= {"dout", "dq"} else None
    out, out_noise, mean_key = out.detach(), out_noise.detach(), mean_key.detach()
    norm = torch.linalg.vector_norm
    scale = plan.attention.softmax_scale
    largest_score = scale * norm(rows["q"], dim=1) * (norm(k, dim=1).max() if len(k) else 0.0)
    tolerance = TOLERANCE.get(observed.dtype, TOLERANCE[torch.float32]) + SCORE_ERROR * largest_score
    comparisons = [("the output", out, rows["out"], norm(out, dim=1) + norm(out_noise, dim=1))]
    if dq_all is not None:
        dq, dq_noise = dq_all.chunk(2, 1)
        rounded_output = scale * norm(rows["dout"] * out, dim=1) * norm(mean_key, dim=1)
        size = norm(dq, dim=1) + norm(dq_noise, dim=1) + rounded_output
        comparisons.append(("the gradient of q", dq, rows["dq"], size))
    for name, right, computed, size in comparisons:
        difference = norm(computed - right, dim=1)
        finite = right.isfinite().all(1)  # else the inputs are at fault, not attention
        wrong = finite & ~(difference <= tolerance * size)
        if not wrong.any():
            continue
        computing = sample.computing_ranks(plan)
        rank = int(np.bincount(computing[wrong.numpy()]).argmax())
        positions = sample.position + np.flatnonzero(wrong.numpy() & (computing == rank))
        worst = float((difference / size.clamp(min=1e-300))[wrong].max())
        by = "is NaN" if np.isnan(worst) else f"differs from the fp64 reference by {worst:.1e} of its size"
        return (
            f"attention of layer {layer}, head {plan.attention.first_head + sample.head}: {name} of queries "
            f"{positions[0]} to {positions[-1]} of document {sample.document}, computed on rank {ranks[rank]} with "
            f"keys {sample.first_key} to {sample.first_key + sample.keys - 1}, {by}, and rounding of "
            f"{str(observed.dtype)[6:]} explains {float(tolerance[wrong].min()):.1e}"
        )
    return None


def _reference(observed: _Observed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of the sample by the definition of attention, fp64 [queries, channels of v]; differentiable.

    Args:
        observed: the sample.
        q: [queries, channels]; more channels than the head has need zeros in q or in k.
        k: [keys, channels].
        v: [keys, any number of channels].
    """
    sample, attention = observed.sample, observed.plan.attention
    position_q, position_k = sample.position + torch.arange(sample.rows), sample.first_key + torch.arange(sample.keys)
    keep = None
    if observed.dropout_key is not None:
        heads = torch.tensor([attention.first_head + sample.head])
        keep = keep_mask(*observed.dropout_key, heads, sample.document, position_q, position_k, attention.dropout)
    out, _ = dense_attention(
        q[:, None], k[:, None], v[:, None], torch.zeros_like(position_q), torch.zeros_like(position_k),
        position_q, position_k, mask=attention.mask, scale=attention.softmax_scale, window=attention.window,
        slopes=None if attention.slopes is None else attention.slopes[sample.head : sample.head + 1],
        keep=keep, dropout_p=attention.dropout,
        sink=None if observed.sink is None else observed.sink.cpu().reshape(1),
        blocks=sample.blocks(observed.plan),
    )  # fmt: skip
    return out[:, 0]
