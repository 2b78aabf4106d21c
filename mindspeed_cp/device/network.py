"""The network devices of this machine and who reaches their addresses."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network device of this machine, IPv4 first."""
    by_device = {
        device: sorted((a.family, a.address) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
        for device, addresses in psutil.net_if_addrs().items()
    }
    return {device: [address for _, address in addresses] for device, addresses in by_device.items() if addresses}


def reach(address: str) -> str:
    """Return who can connect to an address: "this machine", "private network" or "internet"."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_loopback:
        return "this machine"
    return "internet" if parsed.is_global else "private network"
