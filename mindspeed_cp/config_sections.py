"""The sections of the settings that are not about context parallelism: model, data, training, what is kept on disk.

Ideas that Megatron has too carry the key names of its TransformerConfig and of its command line.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mindspeed_cp.config_base import LARGE, Count, Fraction, Natural, NotNegative, Positive, Section
from mindspeed_cp.config_errors import bad_value
from mindspeed_cp.config_model import ModelSettings

__all__ = [
    "LARGE",
    "CheckpointSettings",
    "Count",
    "DataSettings",
    "Fraction",
    "ModelSettings",
    "Natural",
    "NotNegative",
    "OutputSettings",
    "Positive",
    "Section",
    "TrainSettings",
]


class DataSettings(Section):
    """What is read, and how it is packed."""

    corpus: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib: the sources of Python's standard library; or a .txt or .jsonl file, or a folder of them",
    )
    seq_length: Annotated[int, Field(ge=2, le=LARGE)] = Field(
        default=4096, description="context: tokens of a packed row; longer documents are cut, and the cuts are counted"
    )
    balance: Literal["none", "time"] = Field(
        default="none",
        description="time: the documents of a step are laid anew over replicas and micro-batches, so that all replicas "
        "end together by a model of their time, with other numbers of micro-batches; none: rows in turn",
    )


class TrainSettings(Section):
    """Steps, optimizer, schedule, precision, and how the model itself is split."""

    train_iters: Count = Field(default=100, description="optimizer steps")
    global_batch_size: Count = Field(
        default=4, description="packed rows in a step, over all replicas; a row is a micro-batch"
    )
    lr: Annotated[float, Field(gt=0, le=1000)] = Field(default=1e-3, description="highest learning rate")
    min_lr: NotNegative = Field(default=0.0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="shape of the decay")
    lr_warmup_iters: Natural = Field(default=0, description="steps of linear warm-up")
    lr_decay_iters: Count | None = Field(default=None, description="steps until min_lr; null: train_iters")
    weight_decay: NotNegative = Field(default=0.1, description="decoupled weight decay of the matrices")
    adam_beta1: Fraction = Field(default=0.9, description="Adam's beta 1")
    adam_beta2: Fraction = Field(default=0.95, description="Adam's beta 2")
    adam_eps: Positive = Field(default=1e-8, description="Adam's epsilon")
    clip_grad: NotNegative = Field(default=1.0, description="largest norm of the gradient; 0: not clipped")
    device: Literal["auto", "cpu", "npu"] = Field(
        default="auto", description="where ranks compute; auto: npu where torch_npu is installed, else cpu"
    )
    bf16: bool = Field(
        default=False, description="bfloat16 weights and activations with fp32 main weights; false: fp32"
    )
    seed: Natural = Field(default=1234, description="seed of the weights and of the order of the documents")
    tensor_model_parallel_size: Count = Field(default=1, description="ranks that share each matrix")
    pipeline_model_parallel_size: Count = Field(
        default=1, description="ranks that share the layers; only 1 in this version"
    )
    sequence_parallel: bool = Field(
        default=False, description="tensor-parallel ranks also share the rows between their matrices"
    )
    expert_model_parallel_size: Count = Field(
        default=1, description="ranks that share the experts; they are laid over context- and data-parallel ranks"
    )
    use_distributed_optimizer: bool = Field(default=False, description="spread the optimizer's state over the ranks")
    deterministic_mode: bool = Field(
        default=False, description="two runs with the same settings and ranks give the same bits"
    )
    prefetch: Count = Field(default=2, description="micro-batches packed and planned ahead, in a thread of each rank")
    threads_per_rank: Count | None = Field(
        default=None, description="CPU threads of a rank; null: the cores shared out"
    )
    max_restarts: Natural = Field(
        default=0, description="how often all ranks are started again, and resume, after one died"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            rule = "needs tensor_model_parallel_size > 1, whose ranks it gives parts of the rows; use false"
            raise bad_value("sequence_parallel", True, rule)
        return self


class CheckpointSettings(Section):
    """State on disk: <output.folder>/checkpoints/iter_0000050, and the name of the newest one in the file `latest`."""

    save_interval: Natural = Field(
        default=50, description="steps between checkpoints; 0: only at the end or when stopped"
    )
    keep: Count = Field(default=2, description="how many of the newest checkpoints stay on disk")
    resume: bool = Field(
        default=True, description="go on from the newest checkpoint in output.folder; false: refuse if there is one"
    )


class OutputSettings(Section):
    """What the run writes besides checkpoints: metrics.jsonl, loss.png, settings.yaml, summary.json, traces."""

    folder: str = Field(default="runs/default", min_length=1, description="folder of this run's files")
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        default="auto", description="auto: a bar on a terminal, lines elsewhere"
    )
    log_interval: Count = Field(default=10, description="steps between lines, where there is no bar")
    trace_steps: list[int] | None = Field(
        default=None,
        description="steps of which every rank writes what it computed, sent and waited for, as a Perfetto trace in "
        "the folder `trace`, for mindspeed-cp report; the first step of a start is slower than others; null: none",
    )
    trace_interval: Natural = Field(default=0, description="so too every step that this divides; 0: none")

    @model_validator(mode="after")
    def _steps_can_be(self) -> OutputSettings:
        if min(self.trace_steps or [1]) < 1:
            raise bad_value("trace_steps", self.trace_steps, "must be numbers of steps, which are counted from 1")
        return self
