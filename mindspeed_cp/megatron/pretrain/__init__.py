"""What Megatron's own training scripts take, 0.12 to 0.19: arguments, spec, batches, forward step, hooks.

A script changes in at most five lines (docs/megatron.md has them as diffs for 0.12, 0.16 and 0.19)::

    from mindspeed_cp.megatron import pretrain as planned

    pretrain(
        train_valid_test_datasets_provider,
        planned.wrap_model_provider(model_provider),   # up to 0.16; 0.19: model_cfg.pre_wrap_hooks.append(...)
        ModelType.encoder_or_decoder,
        planned.forward_step,
        extra_args_provider=planned.add_arguments,
    )

and its launch script passes ``--cp-plan suite.yaml --spec mindspeed_cp.megatron.pretrain spec``. Every context-parallel
rank reads the whole rows of a micro-batch, plans them by their documents, and keeps the rows that the plan gives it.

Importing this package needs megatron.core; calling what is in it needs megatron.training.
"""

from __future__ import annotations

from mindspeed_cp.megatron.pretrain.data import get_batch, is_dataset_built_on_rank
from mindspeed_cp.megatron.pretrain.layers import PlannedLayers, mtp_block_spec, pre_wrap_hook, wrap_model_provider
from mindspeed_cp.megatron.pretrain.options import add_arguments, settings_of, suite_of
from mindspeed_cp.megatron.pretrain.step import forward_step, loss_func

#: For ``--spec mindspeed_cp.megatron.pretrain spec``, in every version.
spec = PlannedLayers()

__all__ = [
    "PlannedLayers",
    "add_arguments",
    "forward_step",
    "get_batch",
    "is_dataset_built_on_rank",
    "loss_func",
    "mtp_block_spec",
    "pre_wrap_hook",
    "settings_of",
    "spec",
    "suite_of",
    "wrap_model_provider",
]
