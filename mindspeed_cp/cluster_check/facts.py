"""What a rank is: device, memory, versions, and the variables that libraries read. Runs in the workers."""

from __future__ import annotations

import hashlib
import os
import platform
from typing import Any

import torch

from mindspeed_cp.cluster_check.measuring_rank import MeasuringRank
from mindspeed_cp.cluster_check.privacy import library_variables
from mindspeed_cp.device.versions import version_report
from mindspeed_cp.doctor.machine import npu_versions, versions


def rank_facts(context: MeasuringRank, item: dict[str, Any]) -> dict[str, Any]:
    """Return {"node", "local_rank", "host", "device", "memory", "free", "memory_of", "cores", "threads", "versions",
    "refused", "environment"} of this rank; memory in bytes.

    Args:
        context: this rank.
        item: {"salt"}: text with which names of hosts are hashed; "host" tells whether ranks share one, not which.
    """
    name = hashlib.blake2b(f"{item['salt']}{platform.node()}".encode(), digest_size=4).hexdigest()
    kind, statuses = context.device.type, version_report()
    memory, free = _memory(context.device)
    return {
        "node": context.launch.node,
        "local_rank": context.launch.local_rank,
        "host": name,
        "device": _device_name(context.device),
        "memory": memory,
        "free": free,
        "memory_of": name if kind == "cpu" else f"{name} {context.launch.local_rank}",
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "versions": versions(statuses, False) | (npu_versions() if kind == "npu" else {}),
        "refused": [f"{row.package} {row.version}: {row.reason}" for row in statuses if row.status == "refused"],
        "environment": library_variables(os.environ),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU ({platform.machine()})"
    return str(torch.get_device_module(device).get_device_name(device))


def _memory(device: torch.device) -> tuple[int, int]:
    """Return all and free bytes of the device's memory; a CPU has the memory that the system and cgroups leave it."""
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        return int(total), int(free)
    values = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            key, value = line.split(":")
            values[key] = int(value.split()[0]) << 10
    return values["MemTotal"], values["MemAvailable"]
