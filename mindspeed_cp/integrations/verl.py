"""verl's sequence parallelism by plans: its functions with their names and arguments, and its FSDP engine.

verl (0.9) trains packed rows whose position_ids restart. Its engine slices them over a group of "Ulysses" ranks, runs
the model, and gathers the log-probabilities of all tokens, from which every rank of the group computes the same loss.
The functions of :class:`PlannedUlysses` take the place of those of ``verl.utils.ulysses``: rows are cut as a plan says,
in unequal numbers and without padding, and attention runs the plan.

With verl's own trainers, register the engines in the module that ``actor_rollout_ref.model.external_lib`` names::

    from mindspeed_cp.integrations.verl import register_engines

    register_engines(algorithm="hierarchical")

``ulysses_sequence_parallel_size`` stays the number of context-parallel ranks. In a loop of your own that calls verl's
functions, call those of ``PlannedUlysses(model.config, mesh["sp"])`` and ``attach`` it to the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.batch import documents_of_batch
from mindspeed_cp.integrations.huggingface.families import has_dropout
from mindspeed_cp.integrations.huggingface.heads import check_head
from mindspeed_cp.integrations.huggingface.plans import RankPlans, build_plans
from mindspeed_cp.integrations.huggingface.registration import register
from mindspeed_cp.integrations.huggingface.rows import batch_seed, gather_rows, slice_rows
from mindspeed_cp.plan import Topology


class PlannedUlysses:
    """The functions of ``verl.utils.ulysses`` that slice and gather, by a plan for each packed row.

    Methods have verl's names and arguments. The row that was sliced last with its position_ids is the current one:
    tensors without position_ids are sliced as it is, and outputs are gathered as it is.

    Args:
        config: the model's configuration.
        mesh: device mesh of the ranks that share a row, ``mesh["sp"]``.
        algorithm: as for :func:`mindspeed_cp.build_plan`.
        seed: of attention dropout, if the model has it; every row drops other weights.
        backend, timeout: as for :func:`mindspeed_cp.context_parallel_attention`.
        options: options of the algorithm.

    Raises:
        ConfigError: the model, the algorithm or an option is not supported.
    """

    def __init__(
        self,
        config: Any,
        mesh: Any,
        algorithm: str = "hierarchical",
        *,
        seed: int = 0,
        backend: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        self.config, self.mesh, self.algorithm, self.seed, self.options = config, mesh, algorithm, seed, options
        self._of_rank = {"backend": backend} if timeout is None else {"backend": backend, "timeout": timeout}
        self._has_dropout = has_dropout(config)
        self._row: RankPlans | None = None
        self._rows = 0

    @property
    def row(self) -> RankPlans:
        """Plans of the current row. Raises ConfigError if no row was sliced yet."""
        if self._row is None:
            raise ConfigError(
                "no packed row was sliced; valid: ulysses_pad_and_slice_inputs(input_ids, position_ids, ...) first"
            )
        return self._row

    def attach(self, model: Any) -> None:
        """Let a model's layers attend by the plan of the current row.

        Args:
            model: a model of transformers; its attention implementation is set.

        Raises:
            ConfigError: the model's head reads other rows than its own.
        """
        check_head(model)
        model.set_attn_implementation(register())
        model.base_model.register_forward_pre_hook(self._add_plan, with_kwargs=True)

    def ulysses_pad(
        self, input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
    ) -> tuple[Tensor, Tensor | None, int]:
        """Make a packed row the current one; return it as it is, and 0, as plans need no padding.

        Args:
            input_ids_rmpad: [1, tokens].
            position_ids_rmpad: [1, tokens], from 0 in each document; None: a tensor of the current row.
            sp_size: ranks of the group.
            pad_value: not used.

        Raises:
            ConfigError: sp_size is not the size of the mesh, or shapes do not fit.
        """
        if sp_size != self.mesh.size():
            raise ConfigError(f"sp_size is {sp_size}; valid: {self.mesh.size()}, the ranks of the mesh")
        if input_ids_rmpad.dim() != 2 or input_ids_rmpad.shape[0] != 1:
            raise ConfigError(f"the packed row has shape {list(input_ids_rmpad.shape)}; valid: [1, tokens]")
        if position_ids_rmpad is not None:
            if position_ids_rmpad.shape != input_ids_rmpad.shape:
                raise ConfigError(
                    f"position_ids have shape {list(position_ids_rmpad.shape)}; valid: {list(input_ids_rmpad.shape)}, "
                    "as input_ids (positions of vision-language models are not supported)"
                )
            self._start(input_ids_rmpad, position_ids_rmpad)
        return input_ids_rmpad, position_ids_rmpad, 0

    def ulysses_pad_and_slice_inputs(
        self,
        input_ids_rmpad: Tensor,
        position_ids_rmpad: Tensor | None = None,
        sp_size: int = 1,
        skip_position_ids_rmpad: bool = False,
        pad_value: int = 0,
    ) -> tuple[Tensor, Tensor | None, int]:
        """Return this rank's rows of a packed row and of its position_ids, and 0.

        With position_ids the row becomes the current one. Arguments and errors as for :meth:`ulysses_pad`;
        `skip_position_ids_rmpad` returns position_ids as they are, `pad_value` fills the row of a rank without tokens.
        """
        self.ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
        rows = slice_rows(input_ids_rmpad, self.row, 1, pad_value)
        if position_ids_rmpad is not None and not skip_position_ids_rmpad:
            position_ids_rmpad = slice_rows(position_ids_rmpad, self.row, 1)
        return rows, position_ids_rmpad, 0

    def slice_input_tensor(self, x: Tensor, dim: int, padding: bool = True, group: Any = None) -> Tensor:
        """Return this rank's rows of a tensor over the tokens of the current row.

        Args:
            x: [..., tokens, ...].
            dim: dimension of the tokens.
            padding: not used, as plans need none.
            group: that of the mesh, or None.
        """
        self._check_group(group)
        return slice_rows(x, self.row, dim)

    def gather_outputs_and_unpad(
        self,
        x: Tensor,
        gather_dim: int,
        unpad_dim: int | None = None,
        padding_size: int = 0,
        grad_scaler: bool = True,
        group: Any = None,
    ) -> Tensor:
        """Return a tensor over all tokens of the current row, in their order, from the ranks' rows.

        Args:
            x: [..., rows, ...] of this rank.
            gather_dim: dimension of the rows.
            unpad_dim: dimension from whose end `padding_size` is cut off; None: nothing is cut off.
            padding_size: tokens that the caller itself put at the end of the row.
            grad_scaler: True where gradients are averaged over the ranks of the group afterwards (DDP, FSDP).
            group: that of the mesh, or None.

        Raises:
            ConfigError: x has other rows than this rank.
        """
        self._check_group(group)
        whole = gather_rows(x, self.row, gather_dim, self.mesh.size() if grad_scaler else 1.0)
        if unpad_dim is None or not padding_size:
            return whole
        return whole.narrow(unpad_dim, 0, whole.shape[unpad_dim] - padding_size)

    def _start(self, input_ids: Tensor, position_ids: Tensor) -> None:
        """Build the plans of a packed row."""
        documents = documents_of_batch({"input_ids": input_ids, "position_ids": position_ids})
        plans = build_plans(self.config, documents, Topology.from_mesh(self.mesh), self.algorithm, **self.options)
        seed = batch_seed(self.seed, self.mesh, self._rows) if self._has_dropout else None
        self._row = RankPlans(
            plans, self.mesh.get_local_rank(), group=self.mesh.get_group(), dropout_seed=seed, **self._of_rank
        )
        self._rows += 1

    def _check_group(self, group: Any) -> None:
        if group is not None and group is not self.mesh.get_group():
            raise ConfigError("group is another one than the mesh's; valid: None or mesh.get_group()")

    def _add_plan(self, model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Give the model's layers the plan of the current row."""
        return arguments, {**keywords, "plan": self.row}


def planned_engine(engine_class: type, algorithm: str = "hierarchical", **arguments: Any) -> type:
    """Return a class of verl's FSDP engine whose models attend by plans.

    With ``ulysses_sequence_parallel_size`` 1 it is the engine as it was.

    Args:
        engine_class: ``FSDPEngineWithLMHead`` or ``FSDPEngineWithValueHead`` of verl.
        algorithm, arguments: as for :class:`PlannedUlysses`.
    """

    named = {"plan_arguments": {"algorithm": algorithm, **arguments}}
    return type(f"Planned{engine_class.__name__}", (PlannedEngine, engine_class), named)


_Engine: Any = object  # verl's, in planned_engine


class PlannedEngine(_Engine):
    """The methods of verl's FSDP engine by plans."""

    ulysses_sequence_parallel_size: int
    use_ulysses_sp: bool
    plan_arguments: dict[str, Any]

    def _build_module(self) -> Any:
        ranks = self.ulysses_sequence_parallel_size
        # As on one rank: verl's own attention over Ulysses ranks, and its rules for numbers of heads, stay out.
        self.ulysses_sequence_parallel_size = 1
        try:
            module = super()._build_module()
        finally:
            self.ulysses_sequence_parallel_size = ranks
        if ranks > 1:
            self.planned = PlannedUlysses(module.config, self.ulysses_device_mesh["sp"], **self.plan_arguments)
            self.planned.attach(module)
        return module

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
        size = self.ulysses_sequence_parallel_size
        inputs["input_ids"], inputs["position_ids"], _ = self.planned.ulysses_pad_and_slice_inputs(
            inputs["input_ids"], inputs["position_ids"], size
        )
        for name, padding in (("input_ids_rmpad_rolled", 0), ("temperature_rmpad", 1)):
            outputs[name] = slice_rows(outputs[name], self.planned.row, 0, padding)
        if inputs.get("shift_labels") is not None:
            inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
        for name in ("cu_seqlens", "cu_seqlens_cpu"):  # of the whole row; the plan has them
            inputs.pop(name, None)
        return inputs, outputs

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        if not self.use_ulysses_sp:
            return super()._gather_and_unpad_packed(tensor, pad_size)
        return self.planned.gather_outputs_and_unpad(tensor, 0, 0, pad_size)


def register_engines(algorithm: str = "hierarchical", **arguments: Any) -> None:
    """Make planned engines those of verl for the strategies fsdp and fsdp2, on the device of this process.

    Args:
        algorithm, arguments: as for :class:`PlannedUlysses`.

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
