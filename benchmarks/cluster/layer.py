"""What one rank does in a layer, and what a plan says that a layer sends and computes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp import context_parallel_attention
from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.comm import GroupTransport, Pending, Transfer, rank_redistribution, start_redistributions
from mindspeed_cp.engine import prepare
from mindspeed_cp.layout import Redistribution
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads
from mindspeed_cp.plan import AttentionConfig, Plan, traffic
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.simulate.simulator import LinearTimes, linear_times

DTYPE = torch.bfloat16
TIMEOUT = 1800.0  # seconds: only a hang takes so long


class Border:
    """Moves hidden states between the layouts of linear layers and of attention, where a plan says so; hidden states
    are as wide as all heads.

    Args:
        plan: of the layer.
        rank: of its group.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        linear = plan.batch_layout
        rows = int(linear.token_counts[rank])
        between = Redistribution.between(linear, plan.layout, 1)
        width, cpu = hidden(plan), torch.device("cpu")
        self._redistributions = None
        if between is not None:
            self._redistributions = (
                rank_redistribution(between, rank, cpu),
                rank_redistribution(between, rank, cpu, adjoint=True),
            )
            self._held = [torch.zeros(n, 1, width, dtype=DTYPE) for n in (rows, plan.layout.token_counts[rank])]
            self._transport = GroupTransport(None)

    def there(self) -> None:
        """Move hidden states from the linear layout to attention's."""
        self._move(0)

    def back(self) -> None:
        """Move hidden states from attention's layout to the linear one."""
        self._move(1)

    def _move(self, way: int) -> None:
        if self._redistributions is not None:
            start_redistributions(
                [(self._held[way], self._redistributions[way])], self._transport, "hidden states"
            ).finish()


def hidden(plan: Plan) -> int:
    """Return the channels of a hidden state: those of all heads."""
    return plan.attention.heads * plan.attention.head_dim


def planned_bytes(plan: Plan) -> list[int]:
    """Return the bytes that each rank sends in a layer, forward and backward, as the plan has them."""
    sent = traffic(plan, DTYPE.itemsize)["total"]
    between = None if plan.linear_layout is None else Redistribution.between(plan.linear_layout, plan.layout, 1)
    if between is not None:
        sent = sent + 2 * (between.send_volume() + between.send_volume(adjoint=True)) * hidden(plan) * DTYPE.itemsize
    return [int(size) for size in sent]


def busy_seconds(plan: Plan, model: ModelledAttention, linear: bool) -> list[float]:
    """Return the modelled seconds in which each rank computes attention, forward and backward, and the linear part if
    it is asked for."""
    out = [0.0] * plan.ranks
    if linear:
        forward, backward = (model.linear_times(plan, direction).total for direction in (False, True))
        out = (forward + backward).tolist()
    for part in plan.parts_or_self:
        for rank in range(plan.ranks):
            low, high = part.q_layout_compute.head_range(rank, part.attention.heads)
            share, rows = (high - low) / part.attention.heads, int(part.q_layout_compute.token_counts[rank])
            for program, lower in (
                (part.forward, model.lower_forward),
                (part.backward, model.lower_backward),
            ):
                lowered = lower(program.tiles(rank), rows, part.attention, DTYPE)
                out[rank] += sum(work.math * share + work.launch for calls in lowered.values() for work in calls)
    return out


def layer_run(
    plan: Plan,
    rank: int,
    model: ModelledAttention,
    kernels: str,
    linear: bool,
) -> Callable[[], None]:
    """Return a rank's share of a layer: attention forward, linear layers forward and backward, attention backward.

    Args:
        plan: with the rows that really travel.
        rank: of the group.
        model: takes modelled times.
        kernels: "modelled", or "run" on this machine's cores.
        linear: the linear part takes its modelled time.
    """
    a, backend = plan.attention, model if kernels == "modelled" else None
    rows, kv_rows = int(plan.layout.token_counts[rank]), int(plan.kv_layout_in.token_counts[rank])
    shapes = (
        (rows, a.heads, a.head_dim),
        (kv_rows, a.kv_heads, a.head_dim),
        (kv_rows, a.kv_heads, a.head_dim_v),
        (rows, a.heads, a.head_dim_v),
    )
    generator = torch.Generator().manual_seed(rank)
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(DTYPE).requires_grad_(i < 3) for i, shape in enumerate(shapes)
    )
    prepare(plan, rank, DTYPE, backend)
    border = Border(plan, rank)
    forward, backward = (model.linear_times(plan, direction) for direction in (False, True))

    def take(seconds: np.ndarray) -> None:
        if linear:
            model.take(float(seconds[rank]))

    def run() -> None:
        border.there()
        take(forward.before)
        out = context_parallel_attention(q, k, v, plan, None, backend, TIMEOUT)
        take(forward.after)
        border.back()
        take(forward.rest)
        take(backward.rest)
        border.there()
        take(backward.before)
        torch.autograd.grad(out, (q, k, v), dout)
        take(backward.after)
        border.back()

    return run


# An attention backend that takes the modelled time of its kernels and computes nothing.


@dataclass(frozen=True)
class Work:
    """The kernel calls of one (step, slot).

    Attributes:
        math: seconds of all heads' tiles.
        launch: seconds of the launches, whatever the number of heads.
    """

    math: float
    launch: float


class ModelledAttention:
    """Sleeps as long as the tiles of a call would take on a device of the cost model, slowed down by a factor.

    The tiles of a (step, slot) are one kernel call for each kind of mask, as variable-length kernels take them. Where
    heads are split a rank takes its share of the time. Results are not computed: outputs and gradients mean nothing.

    Attributes:
        slept: seconds that calls were modelled to take, since it was last set to 0.
    """

    name = "cpu"  # the device of its tensors
    deterministic = True

    def __init__(self, cost: ComputeCost, factor: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """
        Args:
            cost: of the real layer's attention on the real devices.
            factor: emulated seconds for a real one.
            sleep: waits for that many seconds.
        """
        self._cost, self._factor, self._sleep = cost, factor, sleep
        self.slept = 0.0

    @property
    def key(self) -> Hashable:
        """See the contract."""
        return "modelled", id(self)

    def check(self, attention: AttentionConfig, dtype: torch.dtype) -> None:
        """Accept every attention and type."""

    def check_device(self, device: torch.device) -> None:
        """Check the device as the backend does whose times are modelled."""

    def lower_forward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> dict[tuple[int, int], list[Work]]:
        """See the contract."""
        return self._lower(tiles, attention, backward=False)

    def lower_backward(
        self, tiles: np.ndarray, rows: int, attention: AttentionConfig, dtype: torch.dtype
    ) -> dict[tuple[int, int], list[Work]]:
        """See the contract."""
        return self._lower(tiles, attention, backward=True)

    def _lower(
        self, tiles: np.ndarray, attention: AttentionConfig, backward: bool
    ) -> dict[tuple[int, int], list[Work]]:
        if not len(tiles):
            return {}
        short = np.minimum(tiles["q_rows"], tiles["k_rows"])
        seconds = self._cost.attention_seconds(count_pairs(tiles, attention), short, backward=backward)
        keys, key_of_tile = np.unique(tiles[["step", "slot"]], return_inverse=True)
        math = np.bincount(key_of_tile, weights=seconds, minlength=len(keys)) * self._factor
        calls = [len(np.unique(tiles["mask"][key_of_tile == i])) for i in range(len(keys))]
        launch = self._cost.cluster.launch * self._factor
        return {
            (int(key["step"]), int(key["slot"])): [Work(float(math[i]), calls[i] * launch)]
            for i, key in enumerate(keys)
        }

    def prepare(self, calls: Sequence[Work], attention: AttentionConfig, heads: Heads, device: torch.device) -> None:
        """See the contract: nothing is needed."""

    def forward(
        self, calls: Sequence[Work], attention: AttentionConfig, state: ForwardState, k: Tensor, v: Tensor
    ) -> None:
        """See the contract."""
        self._take(calls, attention, state.heads)

    def backward(
        self,
        calls: Sequence[Work],
        attention: AttentionConfig,
        state: BackwardState,
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """See the contract."""
        self._take(calls, attention, state.heads)

    def linear_times(self, plan: Plan, backward: bool) -> LinearTimes:
        """Return the seconds of each rank's linear layers on this machine, where the simulator has them too: each of
        the three parts that has tokens is one launch."""
        times = linear_times(plan, self._cost, backward)
        launch = self._cost.cluster.launch
        before, after, rest = (
            (seconds + launch * (seconds > 0)) * self._factor for seconds in (times.before, times.after, times.rest)
        )
        return LinearTimes(before, after, rest)

    def take(self, seconds: float) -> None:
        """Take so many seconds of this machine for anything else that is modelled."""
        self._wait(seconds)

    def _take(self, calls: Sequence[Work], attention: AttentionConfig, heads: Heads) -> None:
        share = (heads.q[1] - heads.q[0]) / attention.heads
        self._wait(sum(call.math * share + call.launch for call in calls))

    def _wait(self, seconds: float) -> None:
        self.slept += seconds
        if seconds:
            self._sleep(seconds)


# Counts the bytes that a rank sends, where they are handed to torch.distributed.


@contextmanager
def count_sent_bytes() -> Iterator[Counter[int]]:
    """Count the bytes that this rank sends inside the block, by the rank that receives them."""
    sent: Counter[int] = Counter()
    post = GroupTransport.post

    def counting(self: GroupTransport, transfers: Sequence[Transfer], all_to_all: bool = False) -> list[Pending]:
        for transfer in transfers:
            if transfer.sends:
                sent[transfer.peer] += transfer.tensor.nbytes
        return post(self, transfers, all_to_all)

    with patch.object(GroupTransport, "post", counting):
        yield sent
