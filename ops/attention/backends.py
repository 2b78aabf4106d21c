"""Choice of the attention backend."""

from __future__ import annotations

from functools import cache
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cpu.backend import CpuAttention
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.schema.messages import short_repr

#: Backends with their default options. The npu backend imports torch_npu at its first computation.
BACKENDS: dict[str, AttentionBackend] = {"cpu": CpuAttention(), "npu": NpuAttention(), "cuda": CudaAttention()}


def get_backend(name: str) -> AttentionBackend:
    """Return the backend of a name.

    Raises:
        ConfigError: there is no such backend.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}; valid in this version: {', '.join(BACKENDS)}")
    return BACKENDS[name]


@cache
def _npu(**options: Any) -> NpuAttention:
    return NpuAttention(**options)


def backend_from_settings(suite: Any, device_type: str) -> AttentionBackend:
    """Return the backend that settings choose for tensors of a device type.

    Args:
        suite: section context_parallel_suite; `backend` and, if present, `npu_options` are read.
        device_type: device type of the tensors.

    Raises:
        ConfigError: as for :func:`backend_for_device`.
    """
    options = getattr(suite, "npu_options", None)
    name = device_type if suite.backend == "auto" else suite.backend
    return backend_for_device(device_type, _npu(**options) if name == "npu" and options else name)


def backend_for_device(device_type: str, backend: str | AttentionBackend | None = None) -> AttentionBackend:
    """Return the backend for tensors of a device type ("cpu", "cuda", "npu").

    Args:
        device_type: device type of the tensors.
        backend: a name, a backend object, or None: the default of the device. A backend with an `operator` of its own
            runs on every device.

    Raises:
        ConfigError: no backend supports the device, or the requested backend does not run on it.
    """
    requested = device_type if backend is None else backend
    chosen = get_backend(requested) if isinstance(requested, str) else requested
    if not all(hasattr(chosen, part) for part in ("name", "key", "forward", "backward")):
        raise ConfigError(f"backend is {short_repr(chosen)}; valid: {', '.join(BACKENDS)}, an object of one, or None")
    anywhere = getattr(chosen, "operator", None) is not None
    if chosen.name != device_type and not anywhere:
        raise ConfigError(
            f"backend {chosen.name!r} does not run on tensors of device {device_type!r}; valid: {device_type!r}, "
            "or None"
        )
    return chosen
