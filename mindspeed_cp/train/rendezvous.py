"""The store through which the ranks of one start find each other.

On one machine it is a file of our launcher, in a folder that only this user may enter. On many nodes rank 0 keeps it,
and listens on the address that the others are told, while torch's own stores listen on every interface. Ranks that
torchrun started share the store of its agent. No rank unpickles what a store holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.local_agent import STORE_VARIABLE
from mindspeed_cp.train.nodes import listening_socket

#: torch's newer server of a store takes a socket that listens since 2.8 (pytorch/pytorch#150215); its older one always.
_NEWER_SERVER = torch.__version__ >= "2.8"
_RETRY_SECONDS = 0.2
_TELL_SECONDS = 10.0  # after so long rank 0 says for whom it waits
_COMPLETE = "all ranks came"


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
    """Return the store of rank 0 as soon as all ranks share it.

    Nodes start their ranks by themselves, again after a failure (train.max_restarts) or by hand after a reboot. So a
    rank may find the store of a start that is ending, to which all ranks had come: it waits for that of the next one.

    Raises:
        ConfigError: Rank 0 cannot listen on MASTER_ADDR and MASTER_PORT.
        PeerError: Other ranks do not come.
        DistError: This rank does not find rank 0.
    """
    name, port, deadline = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), _Deadline(timeout)
    if rank == 0:
        listener = listening_socket(name, port, environment.get("GLOO_SOCKET_IFNAME"))
        address, bound = listener.getsockname()[:2]
        store = dist.TCPStore(
            address, bound, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(),
            use_libuv=_NEWER_SERVER,
        )  # fmt: skip
        _wait_for_others(store, size, f"{address}:{bound}", deadline)
        store.set(_COMPLETE, "")
        return store
    while True:
        try:
            store = dist.TCPStore(name, port, size, False, deadline.left, wait_for_workers=False)
            if not store.check([_COMPLETE]):
                store.set(f"rank {rank}", "")
                store.wait([_COMPLETE], deadline.left)
                store.set_timeout(timeout)
                return store
            problem = "rank 0 trains, or ends, with all ranks that it waited for"
        except dist.DistStoreError:  # the time is over
            problem = "not all ranks came"
        except dist.DistNetworkError:  # rank 0 has not started, or ended meanwhile
            if deadline.is_over:
                raise
            problem = "rank 0 ended"
        if deadline.is_over:
            raise PeerError(
                f"rank {rank} waited {deadline.seconds:g} s at MASTER_ADDR = {name} and MASTER_PORT = {port}, and "
                f"{problem}; are all nodes started, with the same settings?"
            )
        time.sleep(_RETRY_SECONDS)


def _wait_for_others(store: dist.Store, size: int, place: str, deadline: _Deadline) -> None:
    """Wait in rank 0 until all ranks have come; say so once.

    Raises:
        PeerError: They do not come in time; tells how many did.
    """
    missing, is_told, seconds = set(range(1, size)), False, deadline.seconds
    while True:
        missing = {rank for rank in missing if not store.check([f"rank {rank}"])}
        if not missing:
            return
        came = f"{size - len(missing)} of {size} ranks"
        if deadline.is_over:
            raise PeerError(
                f"rank 0 waited {seconds:g} s at {place}, and {came} came; are all nodes started, with the same "
                "settings?"
            )
        if not is_told and deadline.passed > _TELL_SECONDS:
            print(f"rank 0 waits at {place} up to {seconds:g} s; {came} are there", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(_RETRY_SECONDS)


class _Deadline:
    """An end of waiting."""

    def __init__(self, timeout: timedelta) -> None:
        self.seconds, self._start = timeout.total_seconds(), time.monotonic()

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """True if the time has passed."""
        return self.passed >= self.seconds

    @property
    def left(self) -> timedelta:
        """The time that is left, at least _RETRY_SECONDS."""
        return timedelta(seconds=max(self.seconds - self.passed, _RETRY_SECONDS))
