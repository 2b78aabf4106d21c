"""Choice of the attention backend."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.device.npu_profile import check_profile_device, profile_of_process
from mindspeed_cp.device.select import npu_identity
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.ops.attention.contract import AttentionBackend
from mindspeed_cp.ops.attention.cpu.backend import CpuAttention
from mindspeed_cp.ops.attention.cuda.backend import CudaAttention
from mindspeed_cp.ops.attention.npu.backend import NpuAttention
from mindspeed_cp.ops.attention.npu.fused_operator import loaded_torch_npu
from mindspeed_cp.plan import AttentionConfig
from mindspeed_cp.schema.messages import short_repr

#: Backends with their default options. The npu backend imports torch_npu at its first computation.
BACKENDS: dict[str, AttentionBackend] = {"cpu": CpuAttention(), "npu": NpuAttention(), "cuda": CudaAttention()}

#: Names of the types that profiles of NPUs use.
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


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


def backend_from_settings(
    suite: Any, device_type: str, attention: AttentionConfig, dtype: torch.dtype
) -> AttentionBackend:
    """Return the backend that settings choose for tensors of a device type.

    Args:
        suite: section context_parallel_suite; `backend`, `cluster` on GPUs, and, if present, `npu_options` and
            `npu_profile` are read.
        device_type: device type of the tensors.
        attention: attention of the layer.
        dtype: type of q, k and v.

    Raises:
        ConfigError: as for :func:`backend_for_device`; or npu_profile is damaged, of another device, or leaves no
            variant that is right; or the cluster was calibrated on another GPU.
    """
    name = device_type if suite.backend == "auto" else suite.backend
    if name == device_type == "cuda":
        return _cuda(suite.cluster)
    if name != "npu" or not hasattr(suite, "npu_options"):
        return backend_for_device(device_type, name)
    if device_type == "npu" and suite.npu_profile is not None:
        check_npu_profile(suite.npu_profile)
    if dtype not in DTYPE_NAMES:
        return backend_for_device(device_type, name)  # the backend refuses the type
    options = suite.npu_options(attention, DTYPE_NAMES[dtype], torch.are_deterministic_algorithms_enabled())
    return backend_for_device(device_type, _npu(**options))


@cache
def _cuda(cluster: str | None) -> AttentionBackend:
    """Return the cuda backend with the times of a cluster's kernels.

    Raises:
        ConfigError: they were measured on another GPU.
    """
    calibrated = None if cluster is None else load_cluster(cluster)
    if calibrated is None or not calibrated.kernel_times:
        return BACKENDS["cuda"]
    device = torch.cuda.get_device_name()
    if calibrated.device != device:
        raise ConfigError(
            f"cluster is {cluster!r}, which was calibrated on {calibrated.device}, and this GPU is {device}; "
            "run `mindspeed-cp calibrate --device cuda` here, or name a preset"
        )
    return CudaAttention(kernel_times=calibrated.kernel_times)


@cache
def check_npu_profile(path: str) -> None:
    """Raise ConfigError unless the profile of a file is of the NPU and the versions of this process."""
    loaded_torch_npu()
    check_profile_device(profile_of_process(path), path, npu_identity())


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
