"""The random state of a rank: torch, NumPy, Python and Megatron."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mindspeed_cp.megatron import megatron_imports

with megatron_imports():
    from megatron.core import tensor_parallel


def get_random_state() -> dict[str, Any]:
    """Return the random state of this rank."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `get_random_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random state at the end of the block."""
    state = get_random_state()
    try:
        yield
    finally:
        set_random_state(state)
