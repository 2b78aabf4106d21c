"""The store through which the ranks of one start find each other.

On one machine it is a file of our launcher, in a folder that only this user may enter. On many nodes rank 0 keeps it,
and listens on the address that the others are told, while torch's own stores listen on every interface. Ranks that
torchrun started share the store of its agent. No rank unpickles what a store holds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.nodes import ATTEMPT_VARIABLE, listening_socket

_RETRY_SECONDS = 0.2


def open_store(environment: Mapping[str, str], rank: int, size: int, local_size: int, timeout: timedelta) -> dist.Store:
    """Open the store of all ranks.

    Args:
        environment: variables of the launcher.
        rank, size, local_size: this rank, number of all ranks, and of those on this machine.
        timeout: until every rank has to be there.

    Raises:
        ConfigError: Rank 0 cannot listen on MASTER_ADDR and MASTER_PORT.
        PeerError: This rank does not find rank 0 there, or not all others come.
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
        return _join_on_rank_0(environment, rank, size, timeout)
    except dist.DistError:
        raise PeerError(
            f"rank {rank} did not find rank 0 by MASTER_ADDR = {name} and MASTER_PORT = {port} within "
            f"{timeout.total_seconds():g} s; are all ranks started, and is the address that of the first one?"
        ) from None


def _join_on_rank_0(environment: Mapping[str, str], rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store of rank 0 as soon as all ranks of the same attempt share it.

    Every node starts its ranks again by itself (train.max_restarts), so one may come while rank 0 still ends the
    attempt before: it waits for the store of its own.

    Raises:
        ConfigError: Rank 0 cannot listen on MASTER_ADDR and MASTER_PORT.
        PeerError: Rank 0 is in a later attempt, or other ranks do not come.
        DistError: This rank does not find rank 0.
    """
    name, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    attempt, deadline = int(environment.get(ATTEMPT_VARIABLE, "0")), time.monotonic() + timeout.total_seconds()
    if rank == 0:
        listener = listening_socket(name, port, environment.get("GLOO_SOCKET_IFNAME"))
        address, bound = listener.getsockname()[:2]
        store = dist.TCPStore(
            address, bound, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store.set("attempt", str(attempt))
    while rank > 0:
        left = timedelta(seconds=max(deadline - time.monotonic(), _RETRY_SECONDS))
        try:
            store = dist.TCPStore(name, port, size, False, left, wait_for_workers=False)
            current = int(store.get("attempt"))
        except dist.DistError:
            if time.monotonic() >= deadline:
                raise
            current = -1  # it ended meanwhile
        if current > attempt:
            raise PeerError(f"rank {rank} was started again {attempt} times, and rank 0 {current} times already")
        if current == attempt:
            break
        time.sleep(_RETRY_SECONDS)
    store.set_timeout(timeout)
    if store.add("joined", 1) == size:
        store.set("complete", "")
    try:
        store.wait(["complete"], timedelta(seconds=max(deadline - time.monotonic(), _RETRY_SECONDS)))
    except dist.DistError:
        raise PeerError(
            f"rank {rank} waited {timeout.total_seconds():g} s for all {size} ranks at MASTER_ADDR = {name} and "
            f"MASTER_PORT = {port}, and {_joined(store)} came; are all nodes started, with the same settings?"
        ) from None
    return store


def _joined(store: dist.Store) -> str:
    try:
        return str(store.add("joined", 0))
    except dist.DistError:  # rank 0 has gone
        return "not all"
