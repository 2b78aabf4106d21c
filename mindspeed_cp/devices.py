"""Which device a setting means; imports nothing."""

from __future__ import annotations

import importlib.util


def device_type(name: str) -> str:
    """ "cpu" or "npu", of train.device: "auto" is the NPU where torch_npu is installed."""
    if name != "auto":
        return name
    return "cpu" if importlib.util.find_spec("torch_npu") is None else "npu"
