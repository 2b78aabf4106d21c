"""An attention backend that takes the modelled time of its kernels and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.cluster import ComputeCost
from mindspeed_cp.ops.attention import BackwardState, ForwardState, Heads
from mindspeed_cp.plan import AttentionConfig, Plan
from mindspeed_cp.plan.tiles import count_pairs
from mindspeed_cp.simulate.linear_times import LinearTimes, linear_times


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
