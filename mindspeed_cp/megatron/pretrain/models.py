"""Hooks that set up models: around model_provider up to 0.16, among pre_wrap_hooks in 0.19."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron.adaptors.model import install_model
from mindspeed_cp.megatron.patches.swap import replaced
from mindspeed_cp.megatron.pretrain.layers import building_virtual_stage, mtp_block_spec, pipelined, planned_layers
from mindspeed_cp.megatron.pretrain.options import suite_of
from mindspeed_cp.megatron.pretrain.start_line import print_start_line

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
        from megatron.training import get_args

        arguments = get_args()
        suite = suite_of(arguments)
        if arguments.spec is None:
            arguments.spec = list(SPEC)
        if pipelined(arguments):
            arguments.variable_seq_lengths = True
        with building_virtual_stage(kwargs.get("vp_stage")), _builder_of_later_layers(arguments):
            try:
                model = model_provider(*args, **kwargs)
            except AssertionError as error:
                if "Context parallelism is only supported by" not in str(error):
                    raise
                raise ConfigError(
                    f"the layers have Megatron's core attention ({error}); valid: planned attention in every layer: "
                    f"--spec {' '.join(SPEC)}, or install(spec, suite_of(args)) where the script makes its own spec"
                ) from None
        install_model(model)
        built.append(model)
        if len(built) == (getattr(arguments, "virtual_pipeline_model_parallel_size", None) or 1):
            print_start_line(built, arguments, suite)
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
    from megatron.training import get_args

    args = get_args()
    suite = suite_of(args)
    install_model(models)
    print_start_line(models, args, suite)
    return models
