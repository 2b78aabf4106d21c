"""Rules of pipeline parallelism, and which layers a stage holds."""

from __future__ import annotations

from mindspeed_cp.config.sections import Sections
from mindspeed_cp.schema.messages import bad_value

STAGES = "train.pipeline_model_parallel_size"
VIRTUAL_STAGES = "train.virtual_pipeline_model_parallel_size"


def layers_of_stage(layers: int, stages: int, virtual_stages: int, stage: int, virtual_stage: int) -> range:
    """Return the layers of a virtual stage, counted from 0; Megatron deals them to the stages in turn.

    Args:
        layers: those of the model; a multiple of stages * virtual_stages.
        stages: pipeline stages.
        virtual_stages: virtual stages of each.
        stage: the pipeline stage.
        virtual_stage: the virtual stage of it.
    """
    count = layers // (stages * virtual_stages)
    first = (virtual_stage * stages + stage) * count
    return range(first, first + count)


def check_pipeline(settings: Sections) -> None:
    """Raise SettingError unless the layers divide among the stages, and nothing needs one stage."""
    train, model, output = settings.train, settings.model, settings.output
    stages, virtual = train.pipeline_model_parallel_size, train.virtual_pipeline_model_parallel_size
    if virtual > 1 and stages == 1:
        rule = f"interleaves pipeline stages, and {STAGES} is 1; use 1, or more stages"
        raise bad_value(VIRTUAL_STAGES, virtual, rule)
    if model.num_layers % (stages * virtual):
        key, value = (STAGES, stages) if model.num_layers % stages else (VIRTUAL_STAGES, virtual)
        product = f"{STAGES} * {VIRTUAL_STAGES} = {stages * virtual}"
        rule = f"must divide model.num_layers = {model.num_layers}, as every virtual stage has equally many layers"
        raise bad_value(key, value, rule if virtual == 1 else f"{rule}: {product} does not")
    if stages == 1:
        return
    _check_experts_of_stages(settings)
    if output.trace_steps:
        rule = (
            f"is not for {STAGES} = {stages}: a trace tells micro-batches apart by their order, and stages mix the "
            "forward of some with the backward of others; use null, or one stage"
        )
        raise bad_value("output.trace_steps", output.trace_steps, rule)
    if virtual > 1 and settings.data.balance != "none":
        rule = (
            f"gives replicas different numbers of micro-batches, and {VIRTUAL_STAGES} = {virtual} needs multiples of "
            f"{STAGES} = {stages}; use none, or one virtual stage"
        )
        raise bad_value("data.balance", settings.data.balance, rule)


def _check_experts_of_stages(settings: Sections) -> None:
    """Raise SettingError unless all stages have layers of experts, or none has: Megatron gives experts an optimizer of
    their own, and a checkpoint could not be loaded whose stages have different ones."""
    train, model = settings.train, settings.model
    stages, virtual = train.pipeline_model_parallel_size, train.virtual_pipeline_model_parallel_size
    without = [
        stage
        for stage in range(stages)
        if not any(
            model.has_experts(layer)
            for number in range(virtual)
            for layer in layers_of_stage(model.num_layers, stages, virtual, stage, number)
        )
    ]
    if without and len(without) < stages:
        rule = (
            f"gives stage {without[0]} of {STAGES} = {stages} no layer of experts, and others have some; give every "
            "stage one, or none, or use fewer stages"
        )
        raise bad_value("model.moe_layer_freq", model.moe_layer_freq, rule)


def check_interleaved_batch(settings: Sections, replicas: int) -> None:
    """Raise SettingError unless the interleaved schedule can run the micro-batches of a replica."""
    train = settings.train
    stages, virtual = train.pipeline_model_parallel_size, train.virtual_pipeline_model_parallel_size
    rows = train.global_batch_size // replicas
    if virtual > 1 and rows % stages:
        rule = (
            f"gives each of {replicas} replicas {rows} rows, and {VIRTUAL_STAGES} = {virtual} needs a multiple of "
            f"{STAGES} = {stages}; use {-(-rows // stages) * stages * replicas}"
        )
        raise bad_value("train.global_batch_size", train.global_batch_size, rule)
