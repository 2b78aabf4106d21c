"""megatron_on_cpu: run unmodified Megatron-core where there is no accelerator.  For CPU runs, tests and CI only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from mindspeed_cp.megatron.cuda_means import AtOnce, CudaMeans
from mindspeed_cp.megatron.swap import replaced

_CPU = torch.device("cpu")


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside this block, what Megatron-core asks of CUDA happens on the CPU: model, DDP, optimizers, schedules,
    recompute.

    For CPU runs, tests and CI: never for training on an accelerator. No Megatron module is changed. Two things are, and
    both are undone on exit, errors included:

    * every torch function with a CUDA device among its arguments runs on the CPU (one TorchFunctionMode; it acts on the
      entering thread only, which is why this must be the main thread, the one that trains);
    * the few functions of torch.cuda that Megatron-core calls by attribute (current_device, streams, events, random
      state) are replaced.

    Random state is that of the CPU, so Megatron's random tracker, activation recompute and dropout work as on a device.
    Entering it again inside itself does nothing more. Enter it before building the model::

        with megatron_on_cpu(), megatron_compat():
            initialize_model_parallel(context_parallel_size=2)
            ...

    Raises:
        RuntimeError: entered in another thread than the main one.
    """
    present: Any = torch.cuda.Stream
    if present is _Stream:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "megatron_on_cpu was entered in a side thread; enter it in the main thread, around the whole training"
        )
    with ExitStack() as stack:
        for owner, name, value in _shims():
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(CudaMeans(_CPU))
        yield


class _Event:
    """On the CPU everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    synchronize = wait = record = _done

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Stream(_Event):
    """Work of a stream is done where it is given."""

    wait_stream = wait_event = _Event._done

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _AnyIndex:
    """torch.cuda.default_generators: on every device the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator


def _shims() -> list[tuple[Any, str, Any]]:
    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: (
            None
        )  # one of its own for each name: torch.compile's tables refuse two names of one

    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    stream = _Stream()
    cuda = torch.cuda
    return [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "set_device", nothing()),
        (cuda, "synchronize", nothing()),
        (cuda, "empty_cache", nothing()),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (cuda, "current_stream", lambda *args: stream),
        (cuda, "default_stream", lambda *args: stream),
        (cuda, "stream", lambda *args: nullcontext()),
        (cuda, "set_stream", nothing()),
        (cuda, "get_rng_state", state),
        (cuda.random, "get_rng_state", state),
        (cuda, "set_rng_state", set_state),
        (cuda, "manual_seed", seed),
        (cuda, "default_generators", _AnyIndex()),
        (cuda, "_queued_calls", AtOnce()),
    ]
