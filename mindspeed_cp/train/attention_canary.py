"""When attention is compared with the reference: train.check_attention_interval."""

from __future__ import annotations

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.engine.canary import AttentionCanary
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.train.world import World


def canary_of_step(settings: Settings, step: int) -> AttentionCanary | None:
    """Return the canary of a step, the same choice on all ranks; None in steps without one."""
    interval, suite = settings.train.check_attention_interval, settings.context_parallel_suite
    if not interval or step % interval:
        return None
    return AttentionCanary(settings.model.num_layers, (settings.train.seed, step), suite.timeout_seconds)


def check_canary(canary: AttentionCanary, step: int, world: World, pools: int) -> None:
    """Compare after the backward, before the weights are changed; a collective of all ranks.

    Args:
        canary: what it took in the step.
        step: number of the step.
        world: this rank among all.
        pools: number of pools that the step is on; 0: replicas.

    Raises:
        CorruptionError: attention is wrong; raised on all ranks, and names layer, rank and queries.
        PeerError: a rank died or did not answer.
    """
    differences = [text for text in world.gather_json(canary.check(world.plan_group(pools))) if text is not None]
    if differences:
        raise CorruptionError(
            f"step {step}: {differences[0]}; the step was not kept, and the same command goes on from the newest "
            "checkpoint; if it happens again on that rank, take its device or machine out"
        )
