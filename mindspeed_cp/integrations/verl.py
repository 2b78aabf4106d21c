"""verl's FSDP engine by plans.

verl (0.9) trains packed rows whose position_ids restart. Its engine slices them over a group of "Ulysses" ranks, runs
the model, and gathers the log-probabilities of all tokens, from which every rank of the group computes the same loss.
:class:`PlannedEngine` does so by a plan: rows are cut in unequal numbers and without padding, and attention runs it.

Register the engines in the module that ``actor_rollout_ref.model.external_lib`` names::

    from mindspeed_cp.integrations.verl import register_engines

    register_engines(algorithm="hierarchical")

``ulysses_sequence_parallel_size`` stays the number of context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.attention import register
from mindspeed_cp.integrations.huggingface.heads import check_model
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.integrations.huggingface.rows import gather_rows, packed_row_plans, slice_rows

_Engine: Any = object  # verl's, in planned_engine


class PlannedEngine(_Engine):
    """The methods of verl's FSDP engine by plans; with one Ulysses rank they are verl's.

    Attributes:
        plan_arguments: arguments of :func:`packed_row_plans`, by name.
        row: plans of the packed row that was prepared last.
    """

    ulysses_sequence_parallel_size: int
    use_ulysses_sp: bool
    plan_arguments: dict[str, Any]
    row: RankPlans
    rows_read = 0

    def _build_module(self) -> Any:
        ranks = self.ulysses_sequence_parallel_size
        # As on one rank: verl's own attention over Ulysses ranks, and its rules for numbers of heads, stay out.
        self.ulysses_sequence_parallel_size = 1
        try:
            module = super()._build_module()
        finally:
            self.ulysses_sequence_parallel_size = ranks
        if ranks > 1:
            check_model(module)
            module.set_attn_implementation(register())
            module.base_model.register_forward_pre_hook(self._add_plan, with_kwargs=True)
        return module

    def _add_plan(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Give the model's layers the plan of the current row."""
        return arguments, {**keywords, "plan": self.row}

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        if not self.use_ulysses_sp:
            return super().prepare_model_inputs(micro_batch)
        distills = micro_batch.get("distillation_use_topk", None)
        if getattr(distills, "data", distills):
            raise ConfigError(
                "distillation_use_topk is set, and verl slices the teacher's rows by its own rule; valid with "
                "planned engines: no top-k distillation, or ulysses_sequence_parallel_size 1"
            )
        self.use_ulysses_sp = False  # the whole row, which is sliced below
        try:
            inputs, outputs = super().prepare_model_inputs(micro_batch)
        finally:
            self.use_ulysses_sp = True
        config, mesh = self.module.config, self.ulysses_device_mesh["sp"]
        self.row = packed_row_plans(config, mesh, inputs["position_ids"], self.rows_read, **self.plan_arguments)
        self.rows_read += 1
        for name in ("input_ids", "position_ids"):
            inputs[name] = slice_rows(inputs[name], self.row, 1)
        for name, padding in (("input_ids_rmpad_rolled", 0), ("temperature_rmpad", 1)):
            outputs[name] = slice_rows(outputs[name], self.row, 0, padding)
        if inputs.get("shift_labels") is not None:
            inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
        for name in ("cu_seqlens", "cu_seqlens_cpu"):  # of the whole row; the plan has them
            inputs.pop(name, None)
        return inputs, outputs

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        if not self.use_ulysses_sp:
            return super()._gather_and_unpad_packed(tensor, pad_size)
        whole = gather_rows(tensor, self.row, 0, self.ulysses_sequence_parallel_size)
        return whole[: len(whole) - pad_size]


def planned_engine(engine_class: type, algorithm: str = "hierarchical", **arguments: Any) -> type:
    """Return a class of verl's FSDP engine whose models attend by plans.

    Args:
        engine_class: ``FSDPEngineWithLMHead`` or ``FSDPEngineWithValueHead`` of verl.
        algorithm, arguments: as for :func:`packed_row_plans`: seed, backend, timeout, and options of the algorithm.
    """
    named = {"plan_arguments": {"algorithm": algorithm, **arguments}}
    return type(f"Planned{engine_class.__name__}", (PlannedEngine, engine_class), named)


def register_engines(algorithm: str = "hierarchical", **arguments: Any) -> None:
    """Make planned engines those of verl for the strategies fsdp and fsdp2, on the device of this process.

    Args:
        algorithm, arguments: as for :func:`planned_engine`.

    Raises:
        ConfigError: verl cannot be imported, or other engines are registered for this device's vendor.
    """
    try:
        from verl.utils.device import get_device_name, get_vendor
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
    except ImportError as error:
        raise ConfigError(f"verl's engine cannot be imported ({error}); valid: verl 0.9") from None
    classes = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
    for model_type, engine_class in classes.items():
        try:
            EngineRegistry.register(
                model_type=model_type, backend=["fsdp", "fsdp2"], device=[get_device_name()], vendor=[get_vendor()]
            )(planned_engine(engine_class, algorithm, **arguments))
        except AssertionError as error:
            raise ConfigError(f"{model_type}: {error}; valid: register_engines once in a process") from None
