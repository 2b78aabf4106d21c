"""What leaves the machine: variables that matter for speed, without names of hosts, addresses, people and secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PREFIXES = (
    "HCCL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "ASCEND_", "ACL", "OMP_", "MKL_", "KMP_", "CUDA_", "P2P_HCCL_",
    "RDMA_", "UCX_", "MALLOC_",
)  # fmt: skip
NAMES = (
    "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF", "COMBINED_ENABLE", "MULTI_STREAM_MEMORY_REUSE", "INF_NAN_MODE_ENABLE",
    "STREAMS_PER_DEVICE", "LCCL_DETERMINISTIC", "LD_PRELOAD",
)  # fmt: skip

#: Parts of names of variables whose values are only said to be set.
PRIVATE = (
    "ADDR",
    "HOST",
    "_IP",
    "TOKEN",
    "SECRET",
    "PASS",
    "KEY",
    "USER",
    "PATH",
    "HOME",
    "FILE",
    "DIR",
    "LD_PRELOAD",
    "RUN_ID",
)
SET = "(set)"

_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|\[?[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?\]?)(?::\d{1,5})?(?![\w.])"
)
HIDDEN_ADDRESS = "<address>"


def library_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries of communication and devices read, sorted; private values as "(set)"."""
    kept = {}
    for name in sorted(environment):
        if name in NAMES or name.startswith(PREFIXES):
            private = any(part in name for part in PRIVATE)
            kept[name] = SET if private else without_addresses(environment[name])
    return kept


def without_addresses(text: str, names: Iterable[str] = ()) -> str:
    """Return a text with addresses, and with names of hosts that are given, replaced."""
    for name in sorted((name for name in names if name), key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "<host>", text)
    return _ADDRESS.sub(HIDDEN_ADDRESS, text)


def scrubbed(value: Any, names: Iterable[str]) -> Any:
    """Return plain data with all texts as by :func:`without_addresses`."""
    names = tuple(names)
    if isinstance(value, str):
        return without_addresses(value, names)
    if isinstance(value, Mapping):
        return {key: scrubbed(entry, names) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(entry, names) for entry in value]
    return value
