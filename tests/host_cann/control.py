"""What tests do to streams of the stand-in: host_cann.h, for Python.  After tests.host_cann.load()."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.host_cann import library


def _handle(stream: torch.npu.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.npu_stream)


def delay(stream: torch.npu.Stream, seconds: float) -> None:
    """Enqueues a task that takes this long."""
    assert library("acl").host_cann_delay(_handle(stream), ctypes.c_uint32(round(seconds * 1e6))) == 0


def hold(stream: torch.npu.Stream) -> None:
    """Enqueues a task that waits for a `release`; what comes after it into the stream waits with it."""
    assert library("acl").host_cann_hold(_handle(stream)) == 0


def release(stream: torch.npu.Stream) -> None:
    """Opens one `hold` of this stream."""
    assert library("acl").host_cann_release(_handle(stream)) == 0


@contextmanager
def held(stream: torch.npu.Stream, seconds: float | None = None) -> Iterator[None]:
    """Tasks that come into the stream within the block do not start before its end; with `seconds`, only then."""
    hold(stream)
    timer = threading.Timer(seconds, release, [stream]) if seconds is not None else None
    if timer:
        timer.start()
    try:
        yield
    finally:
        if timer:
            timer.join()
        else:
            release(stream)


def fail(stream: torch.npu.Stream, code: int, text: str) -> None:
    """Enqueues a task that fails."""
    assert library("acl").host_cann_fail(_handle(stream), code, text.encode()) == 0


def jitter(microseconds: int, seed: int = 0) -> None:
    """A random delay, up to this long, before each task of every stream from now on."""
    library("acl").host_cann_set_jitter(ctypes.c_uint32(microseconds), ctypes.c_uint64(seed))


def tasks() -> int:
    """How many tasks the streams of this process have finished."""
    count = library("acl").host_cann_tasks
    count.restype = ctypes.c_uint64
    return count()


def missing() -> list[str]:
    """Functions of CANN that were called and that the stand-in does not have."""
    names = library("acl").host_cann_missing
    names.restype = ctypes.c_char_p
    return names().decode().split()
