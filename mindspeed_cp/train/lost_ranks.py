"""Who died?  The error of a lost connection names a socket; the survivors find out which rank it was."""

from __future__ import annotations

import time

from torch.distributed import DistError

from mindspeed_cp.errors import PeerError
from mindspeed_cp.train.world import World

WAIT_SECONDS = 8.0  # a busy rank may notice late, and must not be taken for dead
_KEY = "mindspeed_cp/lost_a_peer"


def name_lost_peers(world: World, error: BaseException, wait: float = WAIT_SECONDS) -> PeerError:
    """A PeerError that names the ranks that are gone.

    Every rank that loses a connection says so in the store through which the ranks found each other; those that say
    nothing within `wait` seconds are gone.  (A rank that waits for a survivor loses its connection when that one ends.)
    """
    cause = " ".join(str(error).split())
    try:
        world.store.set(f"{_KEY}/{world.rank}", "here")
        others = [rank for rank in range(world.size) if rank != world.rank]
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            gone = [rank for rank in others if not world.store.check([f"{_KEY}/{rank}"])]
            if not gone:
                return PeerError(f"rank {world.rank} lost a connection, though every rank is alive: {cause}")
            time.sleep(0.1)
    except (DistError, RuntimeError):  # the store itself is gone, with the rank or the launcher that kept it
        return PeerError(f"rank {world.rank} lost its peers and the store that knows them: {cause}")
    ranks = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"
    return PeerError(f"rank {world.rank} lost {ranks}: dead, or silent for longer than the time-out ({cause})")
