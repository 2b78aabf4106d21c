"""Which backend serves which device."""

from __future__ import annotations

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cpu import CpuAttention

BACKENDS: dict[str, AttentionBackend] = {"cpu": CpuAttention()}


def backend_named(name: str) -> AttentionBackend:
    """The backend of that name.

    Raises:
        ConfigError: it is not in this version.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}; valid in this version: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def backend_for(device_type: str, name: str | None = None) -> AttentionBackend:
    """The backend for tensors of a device type ("cpu", "cuda", "npu"), or the one that was asked for.

    Raises:
        ConfigError: no backend serves that device in this version, or the one asked for does not run there.
    """
    backend = backend_named(device_type if name is None else name)
    if backend.name != device_type:
        raise ConfigError(
            f"backend {backend.name!r} does not run on tensors of device {device_type!r}; valid: {device_type!r}, "
            "or None"
        )
    return backend
