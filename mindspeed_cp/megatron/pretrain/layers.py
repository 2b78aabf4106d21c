"""What builds models: the object behind ``--spec mindspeed_cp.megatron.pretrain spec``, in every version of Megatron,
and the hooks around model_provider up to 0.16, among pre_wrap_hooks in 0.19.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from mindspeed_cp import AttentionConfig
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.attentions import launch_settings
from mindspeed_cp.megatron.adaptors.core_attention import PlannedAttention
from mindspeed_cp.megatron.adaptors.model import install_model
from mindspeed_cp.megatron.adaptors.spec import install, local_mtp_spec, local_spec, stage_arguments
from mindspeed_cp.megatron.patches.compat import replaced
from mindspeed_cp.megatron.pretrain.options import suite_of

_virtual_stage: ContextVar[int | None] = ContextVar("virtual pipeline stage of the model that is built", default=None)


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

    @property
    def layer_norm(self) -> Any:
        """Final norm."""
        return self._of_stage().layer_norm

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
    if args.pipeline_model_parallel_size > 1:
        config.variable_seq_lengths = True  # stages exchange rows, whose number differs between micro-batches
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


def print_banner(models: Sequence[nn.Module], args: Namespace, suite: SuiteSettings) -> None:
    """Print on the first rank the algorithm, the attention of the first pipeline stage's layers, and where documents
    end; then the command that models this launch.

    Args:
        models: the model of the first pipeline stage, or its virtual stages.
        args: Megatron's arguments.
        suite: the settings that all layers have.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    modules = (module for model in models for module in model.modules())
    layers = Counter(_attention_words(x.attention) for x in modules if isinstance(x, PlannedAttention))
    options = "".join(f", {name} {value}" for name, value in suite.options.items())
    parts = [f"mindspeed-cp: {suite.algorithm}{options} over {suite.context_parallel_size} context-parallel ranks"]
    parts += [f"{count} layer{'s' if count > 1 else ''}: {words}" for words, count in layers.items()]
    print("; ".join([*parts, f"documents: {_document_words(args)}"]))
    parallel: dict[str, int | str] = {"context_parallel_size": suite.context_parallel_size, "nodes": suite.nodes}
    if suite.cluster is not None:
        parallel["cluster"] = shlex.quote(suite.cluster)
    sizes = launch_settings(transformer_config_of(args)) | parallel
    words = " ".join(f"--set {key}={value}" for key, value in sizes.items())
    print(f"mindspeed-cp: modelled by: mindspeed-cp simulate --lengths LENGTHS {words}", flush=True)


def _attention_words(attention: AttentionConfig) -> str:
    words = [attention.mask]
    if attention.window is not None:
        words.append(f"window {attention.window}")
    if attention.alibi is not False:
        words.append("alibi")
    if attention.dropout:
        words.append(f"dropout {attention.dropout}")
    return ", ".join(words)


def _document_words(args: Namespace) -> str:
    """Return where documents of Megatron's data sets end; a script's own batches may say it in another way."""
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            return f"by cu_seqlens (--{name.replace('_', '-')})"
    if any(getattr(args, name, False) for name in ("reset_position_ids", "cp_plan_documents")):
        return "where positions restart (--reset-position-ids)"
    return "each row of Megatron's data sets is one"


ModelT = TypeVar("ModelT", bound=nn.Module)

#: What --spec names.
SPEC = ("mindspeed_cp.megatron.pretrain", "spec")


def wrap_model_provider(model_provider: Callable[..., ModelT]) -> Callable[..., ModelT]:
    """Return a model provider whose models take their positions from plans; for ``pretrain`` up to 0.16.

    Megatron's arguments are checked before anything is built; the first rank prints a line of what will run. Without
    ``--spec``, which Megatron 0.12 refuses for models with experts, ``args.spec`` becomes that of this package.
    Between pipeline stages, ``args.variable_seq_lengths`` becomes True: micro-batches differ in rows. Models of
    Megatron 0.16's gpt_builders get planned layers of multi-token prediction, too; other providers pass
    ``mtp_block_spec(config, args, vp_stage)``.

    Args:
        model_provider: as the script gives it to ``pretrain``.
    """

    built: list[nn.Module] = []  # virtual stages, until they are all there

    def provider(*args: Any, **kwargs: Any) -> ModelT:
        arguments = _args()
        suite = suite_of(arguments)
        if arguments.spec is None:
            arguments.spec = list(SPEC)
        if arguments.pipeline_model_parallel_size > 1:
            arguments.variable_seq_lengths = True
        stage = _virtual_stage.set(kwargs.get("vp_stage"))
        try:
            with _builder_of_later_layers(arguments):
                model = model_provider(*args, **kwargs)
        except AssertionError as error:
            if "Context parallelism is only supported by" not in str(error):
                raise
            raise ConfigError(
                f"the layers have Megatron's core attention ({error}); valid: planned attention in every layer: "
                f"--spec {' '.join(SPEC)}, or install(spec, suite_of(args)) where the script makes its own spec"
            ) from None
        finally:
            _virtual_stage.reset(stage)
        install_model(model)
        built.append(model)
        if len(built) == (getattr(arguments, "virtual_pipeline_model_parallel_size", None) or 1):
            print_banner(built, arguments, suite)
            built.clear()
        return model

    return provider


@contextmanager
def _builder_of_later_layers(args: Any) -> Iterator[None]:
    """Let Megatron 0.16's gpt_builders build models with multi-token prediction inside this block.

    With ``--spec`` it stops (use_te is unbound), so that it gets none, and its GPTModel gets the planned layers.
    """
    builders = sys.modules.get("gpt_builders")
    if builders is None or not getattr(args, "mtp_num_layers", None) or args.spec != list(SPEC):
        yield
        return
    original = builders.GPTModel

    def model(*, config: Any, vp_stage: int | None = None, **named: Any) -> Any:
        named["transformer_layer_spec"] = planned_layers(config, args, vp_stage)
        named["mtp_block_spec"] = mtp_block_spec(config, args, vp_stage)
        return original(config=config, vp_stage=vp_stage, **named)

    with replaced(builders, "GPTModel", model), replaced(args, "spec", None):
        yield


def pre_wrap_hook(models: list[ModelT]) -> list[ModelT]:
    """Set up the models of all virtual stages: ``model_cfg.pre_wrap_hooks.append(pre_wrap_hook)`` in 0.19."""
    args = _args()
    suite = suite_of(args)
    install_model(models)
    print_banner(models, args, suite)
    return models
