"""--cp-plan-check-attention: some queries are computed again by the fp64 reference, in Megatron's own scripts.

Every N iterations, one layer of the first micro-batch is watched (:mod:`mindspeed_cp.engine.attention_check`). It is
compared when the next micro-batch begins: before the weights change, if the iteration has several. The output is
compared, and the gradient of q if the backward has run by then, as it has without pipeline stages.
"""

from __future__ import annotations

from argparse import Namespace

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.engine.attention_check import AttentionCheck
from mindspeed_cp.errors import CorruptionError
from mindspeed_cp.megatron.adaptors.params import PlannedBatchParams

SETTING = "cp_plan_check_attention"


class IterationChecks:
    """The comparisons of one process, from one micro-batch to the next."""

    def __init__(self) -> None:
        self._iteration = -1  # that was watched last
        self._check: AttentionCheck | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(
        self, args: Namespace, config: TransformerConfig, params: PlannedBatchParams, training: bool, timeout: float
    ) -> None:
        """Compare what was watched before, and watch this micro-batch if it is its turn.

        Args:
            args: Megatron's arguments.
            config: the model's settings.
            params: of the micro-batch.
            training: False for evaluation, which is not watched.
            timeout: seconds to wait for a rank.

        Raises:
            CorruptionError: attention was wrong; raised on the rank that holds the queries.
            PeerError: a rank died or did not answer.
        """
        self._compare()
        interval, iteration = getattr(args, SETTING, 0), int(getattr(args, "curr_iteration", 0) or 0)
        if not (interval and training):
            return
        if iteration % interval == 0 and iteration != self._iteration:
            self._check = AttentionCheck(config.num_layers, (args.seed, iteration), timeout)
            self._iteration = iteration
        if self._check is not None and iteration == self._iteration:
            self._group = (
                parallel_state.get_data_parallel_group(with_context_parallel=True)
                if params.pooled
                else parallel_state.get_context_parallel_group()
            )
            params.attention_check = self._check  # until a layer of this pipeline stage has called it

    def _compare(self) -> None:
        check = self._check
        if check is None or not check.has_observed:
            return
        self._check = None
        difference = check.compare(self._group)
        if difference is not None:
            raise CorruptionError(
                f"iteration {self._iteration}: {difference}; go on from a checkpoint of an earlier iteration; if it "
                "happens again on that rank, take its device or machine out"
            )


#: Of this process; Megatron's training loop is one for each, too.
ATTENTION_CHECK = IterationChecks()
