"""What tests do to streams of the stand-in: host_cann.h, for Python.  After tests.host_cann.load()."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_npu

from tests.host_cann import device_memory, library


def _handle(stream: torch.npu.Stream) -> ctypes.c_void_p:
    """Once torch_npu's queue has made all calls, so that what comes into the stream next comes after them."""
    device_memory.stream(stream.device)  # before the first wait
    return ctypes.c_void_p(stream.npu_stream)


def _handle_at_once(stream: torch.npu.Stream) -> ctypes.c_void_p:
    """Without that wait: for the queue's own thread, and for what lets that thread go on."""
    with torch.npu.stream(stream):
        return ctypes.c_void_p(torch_npu._C._npu_getCurrentRawStreamNoWait(stream.device_index))


def delay(stream: torch.npu.Stream, seconds: float) -> None:
    """Enqueues a task that takes this long."""
    assert library("acl").host_cann_delay(_handle(stream), ctypes.c_uint32(round(seconds * 1e6))) == 0


def hold(stream: torch.npu.Stream) -> None:
    """Enqueues a task that waits for a `release`; what comes after it into the stream waits with it."""
    assert library("acl").host_cann_hold(_handle(stream)) == 0


def release(stream: torch.npu.Stream) -> None:
    """Opens one `hold` of this stream."""
    assert library("acl").host_cann_release(_handle_at_once(stream)) == 0


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


@contextmanager
def late() -> Iterator[None]:
    """Results of ordinary operators come late within the block (HOST_CANN_LATE)."""
    before = os.environ.get("HOST_CANN_LATE")
    os.environ["HOST_CANN_LATE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HOST_CANN_LATE")
        if before is not None:
            os.environ["HOST_CANN_LATE"] = before


@contextmanager
def operator_held(stream: torch.npu.Stream, seconds: float | None = None) -> Iterator[None]:
    """As `held`, for the first operator on this stream within the block: computed, but neither read nor written yet.

    Needs `late`. (`held` would stop the operator itself, which waits for its stream before it computes.)
    """

    handle = _handle(stream)

    def once() -> None:
        device_memory.before_late.remove(once)
        assert library("acl").host_cann_hold(handle) == 0
        if timer:
            timer.start()

    timer = threading.Timer(seconds, release, [stream]) if seconds is not None else None
    device_memory.before_late.append(once)
    try:
        yield
    finally:
        _handle(stream)  # torch_npu's queue has made the call
        assert once not in device_memory.before_late, "no operator ran late"
        if timer:
            timer.join()
        else:
            release(stream)


def missing() -> list[str]:
    """Functions of CANN that were called and that the stand-in does not have."""
    names = library("acl").host_cann_missing
    names.restype = ctypes.c_char_p
    return names().decode().split()
