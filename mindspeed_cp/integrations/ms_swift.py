"""ms-swift's sequence parallelism by plans: rows cut as a plan says, and its attention.

ms-swift (4.6) keeps one object, ``swift.sequence_parallel.sequence_parallel``, that its trainers ask to pad, split and
gather rows and that puts attention over several ranks into models. :func:`use_plans` gives this object those methods by
plans, before a training starts::

    from mindspeed_cp.integrations.ms_swift import use_plans

    use_plans(algorithm="hierarchical")
    sft_main(SftArguments(..., sequence_parallel_size=4, padding_free=True))

With the command line, a file with the first two statements goes to ``--external_plugins``. Packed rows have unequal
numbers of tokens on the ranks and no padding; any number of ranks works, whatever the number of heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.attention import register
from mindspeed_cp.integrations.huggingface.heads import check_model
from mindspeed_cp.integrations.huggingface.loss import IGNORED
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.integrations.huggingface.rows import gather_rows, packed_row_plans, slice_rows


def use_plans(instance: Any = None, algorithm: str = "hierarchical", **arguments: Any) -> None:
    """Give ms-swift's sequence-parallel object its methods by plans.

    Args:
        instance: the object; default: ``swift.sequence_parallel.sequence_parallel``.
        algorithm, arguments: as for :func:`packed_row_plans`: seed, backend, timeout, and options of the algorithm.

    Raises:
        ConfigError: ms-swift cannot be imported, or the object is in use already.
    """
    if instance is None:
        try:
            from swift.sequence_parallel import sequence_parallel
        except ImportError as error:
            raise ConfigError(f"ms-swift cannot be imported ({error}); valid: ms-swift 4.6") from None
        instance = sequence_parallel
    if instance.world_size is not None:
        raise ConfigError("sequence parallelism was prepared before use_plans; valid: use_plans before the training")
    base = type(instance)
    instance.__class__ = type(f"Planned{base.__name__}", (PlannedRows, base), {})
    instance.plan_arguments = {"algorithm": algorithm, **arguments}


_SequenceParallel: Any = object  # its place in the class that use_plans makes


class PlannedRows(_SequenceParallel):
    """The methods of ms-swift's SequenceParallel by plans.

    All ranks of a group are in its "ring" dimension. ms-swift asks for documents there, by their position_ids, wherever
    it splits or gathers.
    """

    def prepare(self, sp_size: int, model: Any, tokenizer: Any, padding_free: bool) -> None:
        if not padding_free:
            raise ConfigError("padding_free is False; valid with plans: True, packed rows")
        self.model_config = model.config
        check_model(model)
        self.rows_read = 0
        super().prepare(sp_size, model, tokenizer, padding_free)

    def pad(self, tensor: Tensor, padding_value: Any, position_ids: Tensor | None = None, dim: int = 1) -> Tensor:
        """Return a tensor as it is: plans need no padding."""
        return tensor

    def split(self, input: Tensor, dim: int, position_ids: Tensor | None = None) -> Tensor:
        return input if self.world_size == 1 else slice_rows(input, self.row_plans(position_ids), dim)

    def gather(self, local_output: Tensor, dim: int, position_ids: Tensor | None = None) -> Tensor:
        if self.world_size == 1:
            return local_output
        return gather_rows(local_output, self.row_plans(position_ids), dim)

    def pad_and_split_inputs(
        self,
        input_ids: Tensor | None,
        input_embeds: Tensor | None,
        labels: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        loss_scale: Tensor | None,
        embed_tokens: Any = None,
        real_position_ids: Tensor | None = None,
        extra_split_values: Any = None,
    ) -> Any:
        results = super().pad_and_split_inputs(
            input_ids, input_embeds, labels, position_ids, attention_mask, loss_scale,
            embed_tokens, real_position_ids, extra_split_values,
        )  # fmt: skip
        if self.world_size == 1 or (labels is None and loss_scale is None):
            return results
        rows = self.row_plans(position_ids if real_position_ids is None else real_position_ids).rows
        ids, embeds, labels, positions, mask, loss_scale, extra = results
        if labels is not None:  # the row of padding that a rank without tokens has
            labels = labels.clone()
            labels[:, rows:] = IGNORED
        if loss_scale is not None:
            loss_scale = loss_scale.clone()
            loss_scale[:, rows:] = 0.0
        return ids, embeds, labels, positions, mask, loss_scale, extra

    def row_plans(self, position_ids: Tensor | None = None, number: int = 0) -> RankPlans:
        """Return the plans of a packed row.

        Args:
            position_ids: [1, tokens], from 0 in each document; default: those of the current row.
            number: number of the row, for its dropout.
        """
        positions = self.real_position_ids if position_ids is None else position_ids
        if positions is None:
            raise ConfigError("position_ids are None; valid: [1, tokens], one packed row")
        return packed_row_plans(self.model_config, self.device_mesh["ring"], positions, number, **self.plan_arguments)

    def _init_device_mesh(self) -> None:
        # ms-swift divides a group by its greatest common divisor with the heads; by 1 all ranks are in "ring".
        self.num_heads = 1
        super()._init_device_mesh()

    def _prepare_flash_attn(self, base_model: Any) -> None:
        """Leave the attention functions of transformers as they are; plans have one of their own."""
        register()

    def _prepare_forward_hook(self, base_model: Any) -> None:
        super()._prepare_forward_hook(base_model)  # splits what the model is given
        base_model.set_attn_implementation(register())
        base_model.register_forward_pre_hook(self._add_plan, with_kwargs=True)

    def _add_plan(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Give the model's layers the plan of the current row."""
        if self.world_size == 1:
            return arguments, keywords
        plan = self.row_plans(number=self.rows_read)
        self.rows_read += 1
        return arguments, {**keywords, "attention_mask": None, "use_cache": False, "plan": plan}
