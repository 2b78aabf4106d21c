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
from mindspeed_cp.comm import GroupTransport, Pending, Transfer
from mindspeed_cp.engine import prepare
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads
from mindspeed_cp.plan import AttentionConfig, Plan, traffic
from mindspeed_cp.plan.tiles import count_pairs

DTYPE = torch.bfloat16
TIMEOUT = 1800.0  # seconds: only a hang takes so long


def planned_bytes(plan: Plan) -> list[int]:
    """Return the bytes that each rank sends in a layer, forward and backward, as the plan has them."""
    sent = traffic(plan, DTYPE.itemsize)["total"]
    return [int(size) for size in sent]


def layer_run(plan: Plan, rank: int, model: ModelledAttention) -> Callable[[], None]:
    """Return a rank's attention of a layer, forward and backward, with kernels that take their modelled time.

    Args:
        plan: with the rows that really travel.
        rank: of all processes.
        model: takes modelled times.
    """
    a = plan.attention
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
    prepare(plan, rank, DTYPE, model)

    def run() -> None:
        out = context_parallel_attention(q, k, v, plan, None, model, TIMEOUT)
        torch.autograd.grad(out, (q, k, v), dout)

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
