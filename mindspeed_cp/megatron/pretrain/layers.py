"""PlannedLayers: the object behind ``--spec mindspeed_cp.megatron.pretrain spec``, in every version of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.local import local_mtp_spec, local_spec, stage_arguments
from mindspeed_cp.megatron.adaptors.spec import install
from mindspeed_cp.megatron.pretrain.options import suite_of

_virtual_stage: ContextVar[int | None] = ContextVar("virtual pipeline stage of the model that is built", default=None)


@contextmanager
def building_virtual_stage(stage: int | None) -> Iterator[None]:
    """Let :class:`PlannedLayers` give the layers of this virtual pipeline stage inside this block."""
    token = _virtual_stage.set(stage)
    try:
        yield
    finally:
        _virtual_stage.reset(token)


class PlannedLayers(TransformerBlockSubmodules):
    """Layers of the model that Megatron's arguments describe, with planned attention, built when Megatron reads them.

    Up to 0.16, ``--spec`` must name an object that is the spec; it is read while the model is built, when arguments
    are known: the fields `layer_specs` and `layer_norm` are made then. 0.19 imports the object before parallel state
    exists, and calls it with its settings when it builds the model. The layers are those that Megatron builds without
    ``--spec``, by ``--transformer-impl``: of Transformer Engine, or "local", which needs Megatron-core alone.
    """

    def __init__(self) -> None:  # the fields are properties
        pass

    def __call__(self, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Return the spec of a pipeline stage.

        Args:
            config: Megatron's GPTModelConfig, or the TransformerConfig.
            vp_stage: virtual pipeline stage.

        Raises:
            ConfigError: arguments or settings cannot be honoured.
        """
        args = _args()
        transformer = getattr(config, "transformer", config)
        return planned_layers(transformer, args, vp_stage)

    @property
    def layer_specs(self) -> Any:
        """Specs of the layers of the stage that is being built."""
        return self._of_stage().layer_specs

    @layer_specs.setter
    def layer_specs(self, value: Any) -> None:
        raise ConfigError(
            "layer_specs of mindspeed_cp.megatron.pretrain.spec cannot be set; call spec(config) for a copy"
        )

    @property
    def layer_norm(self) -> Any:
        """Final norm."""
        return self._of_stage().layer_norm

    @layer_norm.setter
    def layer_norm(self, value: Any) -> None:
        raise ConfigError(
            "layer_norm of mindspeed_cp.megatron.pretrain.spec cannot be set; call spec(config) for a copy"
        )

    def _of_stage(self) -> TransformerBlockSubmodules:
        args = _args()
        stage = _virtual_stage.get()
        interleaved = (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1
        if stage is None and interleaved and stage_arguments(get_gpt_decoder_block_spec, stage):
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {args.virtual_pipeline_model_parallel_size}, and the spec "
                "cannot tell which virtual stage is built; wrap the model provider: "
                "mindspeed_cp.megatron.pretrain.wrap_model_provider(model_provider)"
            )
        return planned_layers(transformer_config_of(args), args, stage)

    def __repr__(self) -> str:
        return "mindspeed_cp.megatron.pretrain.spec"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedLayers:
        return self  # it keeps nothing


def planned_layers(config: TransformerConfig, args: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of a pipeline stage with planned attention."""
    suite = suite_of(args)
    if pipelined(args):
        config.variable_seq_lengths = True
    if args.transformer_impl == "local":
        block = local_spec(config, vp_stage)
    else:
        block = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=True,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),
            **stage_arguments(get_gpt_decoder_block_spec, vp_stage),
        )
    return install(block, suite)


def mtp_block_spec(config: TransformerConfig, args: Any, vp_stage: int | None = None) -> Any:
    """Return the layers of multi-token prediction with planned attention, mtp_block_spec of GPTModel.

    Args:
        config: the model's settings.
        args: Megatron's arguments.
        vp_stage: virtual pipeline stage.

    Returns:
        None without ``--mtp-num-layers``, and on pipeline stages without these layers.
    """
    if not config.mtp_num_layers:
        return None
    decoder = planned_layers(config, args, vp_stage)
    if args.transformer_impl == "local":
        return local_mtp_spec(config, decoder, vp_stage)
    stage = stage_arguments(get_gpt_mtp_block_spec, vp_stage)
    return get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=True, **stage)


def pipelined(args: Any) -> bool:
    """Return True if stages exchange rows, whose number differs between micro-batches."""
    return bool(args.pipeline_model_parallel_size > 1)


def _args() -> Any:
    from megatron.training import get_args

    return get_args()


def transformer_config_of(args: Any) -> TransformerConfig:
    """Return the TransformerConfig of the arguments, as Megatron's own builders make it."""
    if getattr(args, "yaml_cfg", None) is not None:
        from megatron.training.yaml_arguments import core_transformer_config_from_yaml

        return core_transformer_config_from_yaml(args, "language_model")
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)
