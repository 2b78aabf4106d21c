"""What a checkpoint holds, as sharded tensors and objects of Megatron, to be saved or loaded."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import CheckpointException

from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.train.model import TrainingModel
from mindspeed_cp.train.optimizer_state import move_steps_to_host
from mindspeed_cp.train.random_state import get_random_state
from mindspeed_cp.train.world import World

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject


def sharded_state(training: TrainingModel, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved and loaded, as sharded tensors and objects."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    model = training.gpt.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    move_steps_to_host(optimizer)
    return {"model": model, "optimizer": optimizer, "schedule": training.schedule.state_dict()}


def sharded_random_state(world: World) -> ShardedObject:
    """Return the random state of this rank as an object of the checkpoint."""
    return ShardedObject("rng", get_random_state(), (world.size,), (world.rank,), replica_id=0)


def first_cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, which torch wraps."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error
