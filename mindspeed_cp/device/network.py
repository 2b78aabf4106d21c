"""The network devices of this machine and their addresses."""

from __future__ import annotations

import socket

import psutil


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network device of this machine, IPv4 first."""
    by_device = {
        device: sorted((a.family, a.address) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        for device, addresses in psutil.net_if_addrs().items()
    }
    return {device: [address for _, address in addresses] for device, addresses in by_device.items() if addresses}
