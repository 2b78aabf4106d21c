"""What leaves the machine: variables that matter for speed, without names of hosts, addresses, people and secrets."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
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

#: What may be an address; :func:`_hide_address` decides.
_CANDIDATE = re.compile(r"(?<![\w.:])[0-9A-Fa-f:.]*[:.][0-9A-Fa-f:.]*(?:%\w+)?(?!\w)")
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
    return _CANDIDATE.sub(_hide_address, text)


def _hide_address(match: re.Match[str]) -> str:
    """Return a text without the address that it begins with; the port stays."""
    text = match[0]
    for address in (text, text.rpartition(":")[0], text.rstrip(".:")):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            continue
        return HIDDEN_ADDRESS + text[len(address) :]
    return text


def scrubbed(value: Any, names: Iterable[str]) -> Any:
    """Return plain data, or a dataclass of it, with all texts as by :func:`without_addresses`."""
    names = tuple(names)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: scrubbed(getattr(value, field.name), names) for field in fields(value)})
    if isinstance(value, str):
        return without_addresses(value, names)
    if isinstance(value, Mapping):
        return {key: scrubbed(entry, names) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(entry, names) for entry in value]
    return value
