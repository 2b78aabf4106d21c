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
    models = {
        key: part.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for key, part in zip(model_keys(training), training.models, strict=True)
    }
    optimizer = training.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    move_steps_to_host(optimizer)
    return {**models, "optimizer": optimizer, "schedule": training.schedule.state_dict()}


def model_keys(training: TrainingModel) -> list[str]:
    """Return Megatron's names of the parts of the model in a checkpoint's state. On disk, weights have the names that
    they have in the whole model."""
    count = len(training.models)
    return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


def sharded_random_state(world: World) -> ShardedObject:
    """Return the random state of this rank as an object of the checkpoint."""
    return ShardedObject("rng", get_random_state(), (world.size,), (world.rank,), replica_id=0)


def first_cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, which torch wraps."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error
