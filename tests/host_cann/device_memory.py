"""How the operators of fallback.py come to memory: waiting for a stream, reading, and writing at once or late."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.host_cann import task_queue

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # ACL_MEMCPY_...
DIMENSIONS = 12  # HOST_CANN_DIMENSIONS
before_late: list[Callable[[], None]] = []  # for tests: called before an operator's late tasks go into the stream


_acl: ctypes.CDLL
_raw_stream: Callable[[int], int]  # torch.npu.current_stream(index).npu_stream, but quick


def declare(acl: ctypes.CDLL) -> None:
    """Once, before all else here: libascendcl of the stand-in."""
    global _acl, _raw_stream
    _acl = acl
    _raw_stream = sys.modules["torch_npu"]._C._npu_getCurrentRawStream
    acl.host_cann_drain.argtypes = [ctypes.c_void_p]
    acl.host_cann_watch.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    acl.host_cann_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    acl.aclrtMemcpyAsync.argtypes = [pointer, size, pointer, size, ctypes.c_int, pointer]
    acl.aclrtMemsetAsync.argtypes = [pointer, size, ctypes.c_int32, size, pointer]


def stream(device: torch.device) -> int:
    """Handle of the current stream of this thread. Waits until torch_npu's queue has made all calls, and for no stream."""
    task_queue.release_lock_in_waits()
    current = torch.npu.current_device()
    if device.index in (None, current):
        return _raw_stream(current)
    with torch.npu.device(device.index):  # a queue for each device: torch_npu empties the current one's
        return _raw_stream(device.index)


def drain(device: torch.device, name: str) -> None:
    """Waits for the current stream of a device; raises RuntimeError if one of its tasks failed and nobody was told."""
    check(_acl.host_cann_drain(stream(device)), f"{name}: an earlier task of the current stream failed")


def check(code: int, what: str) -> None:
    """Raises RuntimeError with the runtime's text unless `code` is 0."""
    if code:
        raise RuntimeError(f"{what}, error code {code}: {_acl.aclGetRecentErrMsg().decode()}")


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies on the current stream, asynchronously; both dense, alike, and on the same device or one on the host."""
    size = source.numel() * source.element_size()
    on_device = target if target.device.type == "npu" else source
    kind = (
        HOST_TO_DEVICE if source.device.type == "cpu" else DEVICE_TO_DEVICE if on_device is target else DEVICE_TO_HOST
    )
    handle = stream(on_device.device)
    code = _acl.aclrtMemcpyAsync(target.data_ptr(), size, source.data_ptr(), size, kind, handle)
    check(code, "aten::copy_")


def fill_bytes(tensor: torch.Tensor, value: int) -> None:
    """Fills a tensor's memory on the current stream, asynchronously."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size:
        code = _acl.aclrtMemsetAsync(storage.data_ptr(), size, value, size, stream(tensor.device))
        check(code, "poison")


def host(tensor: torch.Tensor) -> torch.Tensor:
    """CPU tensor over the memory of an npu tensor, which must live as long. Waits for nothing."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    view = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


# --- late results -------------------------------------------------------------------------------------------------------


class View(ctypes.Structure):
    """struct host_cann_view."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("item", ctypes.c_int64),
        ("dimensions", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * DIMENSIONS),
        ("strides", ctypes.c_int64 * DIMENSIONS),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        item = tensor.element_size()
        rows = ctypes.c_int64 * DIMENSIONS
        strides = rows(*(stride * item for stride in tensor.stride()))
        return cls(tensor.data_ptr(), item, tensor.dim(), rows(*tensor.shape), strides)


def late() -> bool:
    """Whether HOST_CANN_LATE is 1."""
    return _on("HOST_CANN_LATE")


def poison() -> bool:
    """Whether HOST_CANN_POISON is 1."""
    return _on("HOST_CANN_POISON")


def _on(name: str) -> bool:
    setting = os.environ.get(name, "0")
    if setting not in ("0", "1"):
        raise ValueError(f"{name}={setting}; valid: 0, 1")
    return setting == "1"


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The npu tensors in arguments that have elements."""
    if isinstance(value, torch.Tensor) and value.device.type == "npu" and value.numel():
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def watch(name: str, device: torch.device, inputs: list[torch.Tensor]) -> None:
    """From now until the current stream comes to it, these tensors must not change."""
    for hook in before_late:
        hook()
    views = (View * len(inputs))(*map(View.of, inputs))
    check(_acl.host_cann_watch(stream(device), name.encode(), len(inputs), views), name)


def copied(value: Any) -> Any:
    """CPU tensors of their own, for an operator to write into."""
    return value.clone() if isinstance(value, torch.Tensor) else [item.clone() for item in value]


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a CPU tensor of the same shape and type into an npu tensor: at once, or by a task of the current stream."""
    if not target.numel():
        return
    if not late() or target.is_conj() or target.is_neg():
        if poison():  # which is on its way
            drain(target.device, "poison")
        host(target).copy_(value)
        return
    value = value.resolve_conj().resolve_neg().contiguous()
    check(_acl.host_cann_write(stream(target.device), ctypes.byref(View.of(target)), value.data_ptr()), "a late result")
