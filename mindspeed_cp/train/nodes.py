"""The machines of one start, and where their ranks meet."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from mindspeed_cp.device.network import interface_addresses
from mindspeed_cp.errors import ConfigError


@dataclass(frozen=True)
class Nodes:
    """The nodes of a start, as one of them sees it. Each starts equally many ranks, numbered node by node.

    Attributes:
        count: number of nodes.
        rank: this node, 0 to count - 1.
        address, port: where rank 0 listens for the others, if there are many nodes; a name or an address of node 0.

    Raises:
        ConfigError: A value is missing or out of range.
    """

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = 29500

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--nodes {self.count}: must be 1 or more")
        if not 0 <= self.rank < self.count:
            raise ConfigError(f"--node-rank {self.rank}: must be 0 to {self.count - 1}; --nodes is {self.count}")
        if self.count > 1 and not self.address:
            raise ConfigError(f"--master-addr: needed for {self.count} nodes: the name or an address of node 0")
        if not 1024 <= self.port <= 65535:
            raise ConfigError(f"--master-port {self.port}: must be 1024 to 65535")

    def environment(self) -> dict[str, str]:
        """Return the variables that tell ranks of many nodes where they meet."""
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)} if self.count > 1 else {}


def listening_socket(name: str, port: int, interface: str | None = None) -> socket.socket:
    """Return a socket that listens on one address of this machine alone.

    Args:
        name: MASTER_ADDR, the name or address by which others reach this machine.
        port: MASTER_PORT.
        interface: the network device whose address is taken if this machine knows its own name as a loop-back address
            only (127.0.1.1 on Debian), which others would not reach.

    Raises:
        ConfigError: The name is not of this machine, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR = {name}: cannot be found ({error.strerror}); give the address itself"
        ) from None
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ConfigError(
            f"MASTER_ADDR = {name}: means every address of this machine; give the one that the other nodes reach, in a "
            "network of your own"
        )
    if name not in ("localhost", address[0]) and ipaddress.ip_address(address[0]).is_loopback:
        addresses = interface_addresses().get(interface or "", [])
        if not addresses:
            raise ConfigError(
                f"MASTER_ADDR = {name}: is {address[0]} on this machine, which other nodes do not reach; give the "
                "address itself, or name the network device that has it (GLOO_SOCKET_IFNAME)"
            )
        family, _, _, _, address = socket.getaddrinfo(addresses[0], port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"MASTER_ADDR = {name}, MASTER_PORT = {port}: rank 0 cannot listen there ({error.strerror}); must be an "
            "address of the machine of rank 0 and a port that is free there, the same on all nodes"
        ) from None
    return listener
