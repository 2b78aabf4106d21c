"""Which backend serves which device."""

from __future__ import annotations

from functools import cache
from typing import Any

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cpu import CpuAttention
from mindspeed_cp.ops.attention.cuda import CudaAttention
from mindspeed_cp.ops.attention.npu import NpuAttention

#: The backends with their default options. The npu backend imports torch_npu when it computes, not before.
BACKENDS: dict[str, AttentionBackend] = {"cpu": CpuAttention(), "npu": NpuAttention(), "cuda": CudaAttention()}


def backend_named(name: str) -> AttentionBackend:
    """The backend of that name.

    Raises:
        ConfigError: it is not in this version.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}; valid in this version: {', '.join(BACKENDS)}")
    return BACKENDS[name]


@cache
def _npu(lowering: str, alibi: str, merge: str) -> NpuAttention:
    return NpuAttention(lowering, alibi, merge)


def backend_of(suite: Any, device_type: str) -> AttentionBackend:
    """The backend that settings choose for tensors of a device type.

    Args:
        suite: a section context_parallel_suite: its `backend`, and `npu_options` where it has that.
        device_type: of the tensors.

    Raises:
        ConfigError: as for :func:`backend_for`.
    """
    options = getattr(suite, "npu_options", None)
    name = device_type if suite.backend == "auto" else suite.backend
    return backend_for(device_type, _npu(**options) if name == "npu" and options else name)


def backend_for(device_type: str, backend: str | AttentionBackend | None = None) -> AttentionBackend:
    """The backend for tensors of a device type ("cpu", "cuda", "npu"), or the one that was asked for.

    Args:
        device_type: of the tensors.
        backend: a name; or a backend with options of its own; None: by the device. One with an `operator` of its own
            runs wherever that operator does.

    Raises:
        ConfigError: no backend serves that device in this version, or the one asked for does not run there.
    """
    asked = device_type if backend is None else backend
    chosen = backend_named(asked) if isinstance(asked, str) else asked
    anywhere = getattr(chosen, "operator", None) is not None
    if chosen.name != device_type and not anywhere:
        raise ConfigError(
            f"backend {chosen.name!r} does not run on tensors of device {device_type!r}; valid: {device_type!r}, "
            "or None"
        )
    return chosen
