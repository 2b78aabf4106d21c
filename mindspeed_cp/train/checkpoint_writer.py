"""Writer of Megatron's checkpoint format within this process.

Megatron's own writer forks a process for each file and keeps a manager process for each rank for as long as the rank
lives.  A fork while other threads run (one makes batches) may inherit a lock that is never released, and the manager
outlives a rank that is killed. This one writes the same files by torch's own writer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as torch_checkpoint

from mindspeed_cp.megatron import megatron_imports

with megatron_imports():
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's "torch_dist" format, version 1, without other processes."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's shards and, on the first rank, the metadata; every rank calls it."""
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
