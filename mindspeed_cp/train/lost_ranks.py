"""Ranks behind a lost connection, whose error names only a socket."""

from __future__ import annotations

import time

from torch.distributed import DistError

from mindspeed_cp.errors import PeerError
from mindspeed_cp.schema.messages import name_ranks
from mindspeed_cp.train.local_agent import ended_ranks
from mindspeed_cp.train.world import World

WAIT_SECONDS = 8.0  # a busy rank may notice late
_KEY = "mindspeed_cp/lost_a_peer"


def name_lost_ranks(world: World, error: BaseException, wait: float = WAIT_SECONDS) -> PeerError:
    """Return a PeerError that names the lost ranks.

    Every rank that loses a connection sets a key in the store through which the ranks found each other; ranks without a
    key after `wait` seconds are lost, or wait for a survivor, as stages of a pipeline do: they lose their connections
    when it ends. Where our launcher started the ranks, it tells which one has ended, and nobody waits.
    """
    cause = " ".join(str(error).split())
    try:
        world.store.set(f"{_KEY}/{world.rank}", "here")
        others = [rank for rank in range(world.size) if rank != world.rank]
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            ended = [rank for rank in ended_ranks() if rank != world.rank]
            lost = ended or [rank for rank in others if not world.store.check([f"{_KEY}/{rank}"])]
            if not lost:
                return PeerError(f"rank {world.rank} lost a connection, though every rank is alive: {cause}")
            if ended:
                break
            time.sleep(0.1)
    except (DistError, RuntimeError):  # the store itself is gone, with the rank or the launcher that kept it
        return PeerError(f"rank {world.rank} lost its peers and the store that knows them: {cause}")
    silent = "silent for longer than the time-out"
    reason = f"dead, or {silent}" if len(lost) == 1 else f"dead, {silent}, or waiting for a rank that is"
    return PeerError(f"rank {world.rank} lost {name_ranks(lost)}: {reason} ({cause})")
