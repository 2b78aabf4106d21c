"""The store through which the ranks of one start find each other.

On one machine it is a file of our launcher, in a folder that only this user may enter. On many nodes rank 0 keeps it,
and listens on the address that the others are told, while torch's own stores listen on every interface. Ranks that
torchrun started share the store of its agent. No rank unpickles what a store holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.nodes import listening_socket


def open_store(environment: Mapping[str, str], rank: int, size: int, local_size: int, timeout: timedelta) -> dist.Store:
    """Open the store of all ranks.

    Args:
        environment: variables of the launcher.
        rank, size, local_size: this rank, number of all ranks, and of those on this machine.
        timeout: until every rank has to be there.

    Raises:
        ConfigError: Rank 0 cannot listen on MASTER_ADDR and MASTER_PORT.
        PeerError: This rank does not find rank 0 there.
    """
    shared_file = environment.get(STORE_VARIABLE)
    if shared_file is not None and size == local_size:
        store = dist.FileStore(shared_file, size)
        store.set_timeout(timeout)
        return store
    name, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
            # torchrun may restart ranks over the same store, which still has the addresses of their first attempt.
            return dist.PrefixStore(f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
        if rank > 0:
            return dist.TCPStore(name, port, size, False, timeout)
    except dist.DistError:
        raise PeerError(
            f"rank {rank} did not find rank 0 by MASTER_ADDR = {name} and MASTER_PORT = {port} within "
            f"{timeout.total_seconds():g} s; are all ranks started, and is the address that of the first one?"
        ) from None
    listener = listening_socket(name, port, environment.get("GLOO_SOCKET_IFNAME"))
    address, port = listener.getsockname()[:2]
    return dist.TCPStore(address, port, size, True, timeout, master_listen_fd=listener.detach())
