"""What the engine needs of an operator of linear attention: three functions over the segments of a rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mindspeed_cp.plan.states import StateConfig

Value = TypeVar("Value")


class StateInputs(NamedTuple):
    """Rows of one rank, segment by segment; heads are those that the rank computes.

    Attributes:
        q, k: [t, heads, head_dim].
        v: [t, heads, head_dim_v].
        gate: log of the decay, at most 0; [t, heads], or [t, heads, head_dim] with a gate for each channel.
        beta: write strength [t, heads]; None: 1, without a delta term.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor | None


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """Segments of one rank: known on the host before any tensor is there, so that no layer waits for a device.

    Attributes:
        lengths: rows of each segment, int64 [segments].
        entered: segments that a state enters, int64.
        carried: segments whose S_out enters another one, int64.
        mapped: those of `carried` that a state enters, int64; only their M is needed.
        device: device of the rows.
    """

    lengths: np.ndarray
    entered: np.ndarray
    carried: np.ndarray
    mapped: np.ndarray
    device: torch.device

    @cached_property
    def offsets(self) -> np.ndarray:
        """First row of each segment, and the number of rows; int64 [segments + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}

    def keep(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """Return what `build` returned at the first call for a key: what an operator derives from the table."""
        if key not in self._kept:
            self._kept[key] = build()
        value: Value = self._kept[key]
        return value

    def index(self, numbers: np.ndarray) -> Tensor:
        """Return numbers as a tensor on the device."""
        return torch.from_numpy(numbers).to(self.device)


class StateOperator(Protocol):
    """Computes segments. States are [heads, head_dim_v, head_dim], in fp32, or fp64 with rows of fp64.

    Attributes:
        name: name for messages.
    """

    name: str

    def check(self, config: StateConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ConfigError unless the operator computes this linear attention, type and device."""

    def prepare(self, x: StateInputs, config: StateConfig, table: SegmentTable) -> Any:
        """Return what does not depend on the states that enter; differentiable in x."""

    def maps(self, prepared: Any) -> tuple[Tensor, Tensor]:
        """Return M of `table.mapped` and H of `table.carried`; not differentiated.

        M is [n, heads, head_dim, head_dim], or [n, heads, 1, 1] without a delta term.
        """

    def run(self, prepared: Any, entering: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, [t, heads, head_dim_v] of the type of v, and S_out of `table.carried`; differentiable.

        Args:
            prepared: from `prepare`.
            entering: S_in of `table.entered`; the others begin with 0.
        """


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of states and maps of rows of a type."""
    return torch.float64 if dtype is torch.float64 else torch.float32
