"""What the ranks of a run over many nodes open to the network, by the launcher that starts them.

Seen with torch 2.13 in /proc/net: its stores listen on every interface, whatever address they are given. None asks for
a password.
"""

from __future__ import annotations

from typing import Any

from mindspeed_cp.device.network import interface_addresses, reach

#: Launcher, what listens, what a stranger who connects can do.
LAUNCHERS = (
    (
        "mindspeed-cp train --nodes",
        "a store, on the address of --master-addr",
        "write to the store: lead ranks astray",
    ),
    (
        "torchrun --master-port (static)",
        "a store, on all interfaces",
        "write to the store: lead ranks astray",
    ),
    (
        "torchrun --rdzv-backend c10d, --standalone, no port",
        "two stores, on all interfaces",
        "run code as you: the agent unpickles what a store holds",
    ),
)


def exposure() -> dict[str, Any]:
    """Return {"launchers", "addresses", "note"}: LAUNCHERS, the addresses of this machine and who reaches them, and a
    warning if one of them is in the internet, or None."""
    launchers = [dict(zip(("launcher", "listens", "stranger"), row, strict=True)) for row in LAUNCHERS]
    addresses = [
        {"device": device, "address": address, "reach": reach(address)}
        for device, own_addresses in interface_addresses().items()
        for address in own_addresses
    ]
    public = [f"{row['device']} ({row['address']})" for row in addresses if row["reach"] == "internet"]
    note = None
    if public:
        note = (
            f"{', '.join(public)} is reached from the internet: for many nodes use `mindspeed-cp train --nodes` on the "
            "address of a private network (docs/ascend.md), and a firewall against torchrun's ports"
        )
    return {"launchers": launchers, "addresses": addresses, "note": note}
