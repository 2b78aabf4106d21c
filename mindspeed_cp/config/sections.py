"""The sections of the settings, each valid by itself; `config/rules.py` checks what must fit together.

Ideas that Megatron has too carry the key names of its TransformerConfig and of its command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mindspeed_cp.algorithms import AUTO, algorithm_options
from mindspeed_cp.config.model import ModelSettings
from mindspeed_cp.config.suite import SuiteSettings
from mindspeed_cp.schema.base import (
    SETTING_LIMIT,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from mindspeed_cp.schema.messages import bad_value, unknown_key

POOL = "pool"  #: the value of data.balance that plans replicas together


class DataSettings(Section):
    """The corpus and how it is packed."""

    corpus: str = Field(
        default="stdlib",
        min_length=1,
        description="stdlib: sources of Python's standard library; or a .txt or .jsonl file",
    )
    seq_length: Annotated[int, Field(ge=2, le=SETTING_LIMIT)] = Field(
        default=4096, description="context: tokens of a packed row; longer documents are cut and counted"
    )
    balance: Literal["none", "time", "pool"] = Field(
        default="none",
        description="time: dispatch the documents of each step over replicas and micro-batches, so that all replicas "
        "end at the same modelled time, with different numbers of micro-batches; pool: as time, or all ranks of all "
        "replicas as one pool in the steps where that is modelled to be faster, with algorithm: hierarchical; none: "
        "rows in order",
    )


class TrainSettings(Section):
    """Steps, optimizer, schedule, precision, and parallelism of the model."""

    train_iters: PositiveInt = Field(default=100, description="optimizer steps")
    global_batch_size: PositiveInt = Field(
        default=4, description="packed rows of a step, over all replicas; a row is a micro-batch"
    )
    lr: Annotated[float, Field(gt=0, le=1000)] = Field(default=1e-3, description="highest learning rate")
    min_lr: NonNegativeFloat = Field(default=0.0, description="learning rate at the end of the decay")
    lr_decay_style: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="shape of the decay")
    lr_warmup_iters: NonNegativeInt = Field(default=0, description="steps of linear warm-up")
    lr_decay_iters: PositiveInt | None = Field(default=None, description="steps until min_lr; null: train_iters")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="decoupled weight decay of the matrices")
    adam_beta1: FractionBelowOne = Field(default=0.9, description="Adam's beta 1")
    adam_beta2: FractionBelowOne = Field(default=0.95, description="Adam's beta 2")
    adam_eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon")
    clip_grad: NonNegativeFloat = Field(default=1.0, description="largest norm of the gradient; 0: not clipped")
    device: Literal["auto", "cpu", "npu", "cuda"] = Field(
        default="auto",
        description="device of the ranks; auto: npu if torch_npu is installed, else cpu; cuda: NVIDIA GPUs, never auto",
    )
    bf16: bool = Field(
        default=False, description="bfloat16 weights and activations with fp32 main weights; false: fp32"
    )
    seed: NonNegativeInt = Field(default=1234, description="seed of the weights and of the order of the documents")
    tensor_model_parallel_size: PositiveInt = Field(default=1, description="ranks that share each matrix")
    data_parallel_size: PositiveInt | None = Field(
        default=None,
        description="data-parallel replicas, for which `mindspeed-cp train` starts ranks; null: as many as the ranks "
        "make, one where no number of ranks is given",
    )
    sequence_parallel: bool = Field(
        default=False, description="tensor-parallel ranks also share the rows between their matrices"
    )
    expert_model_parallel_size: PositiveInt = Field(
        default=1, description="ranks that share the experts; they are laid over context- and data-parallel ranks"
    )
    deterministic_mode: bool = Field(
        default=False, description="two runs with the same settings and ranks give the same bits"
    )
    threads_per_rank: PositiveInt | None = Field(
        default=None, description="CPU threads of a rank; null: an equal share of the cores"
    )
    compare: list[str] = Field(
        default_factory=list,
        description="algorithms, such as ring or hybrid:ulysses_degree=4, that run on the first batches before the "
        "training, beside its own: a table shows loss, imbalance, bytes and time; the training stays the same",
    )
    check_attention_interval: NonNegativeInt = Field(
        default=0,
        description="steps between comparisons of some queries of one head, forward and backward, with attention in "
        "fp64; a difference ends the run; 0: never",
    )
    nonfinite_policy: Literal["stop", "skip"] = Field(
        default="stop",
        description="after a step whose loss or gradient is not finite, or whose loss is a spike: stop; skip: leave "
        "the weights as they are, and go on with the next batch",
    )
    spike_mads: NonNegativeFloat = Field(
        default=0.0,
        description="a loss is a spike if it exceeds the median of the last 64 by more than this many median absolute "
        "deviations, of which one is at least 1 % of the median, such as 10; 0: none is",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            rule = "needs tensor_model_parallel_size > 1; use false"
            raise bad_value("sequence_parallel", True, rule)
        return self


class CheckpointSettings(Section):
    """Checkpoints: <output.folder>/checkpoints/iter_0000050, and the name of the newest one in the file `latest`."""

    save_interval: NonNegativeInt = Field(
        default=50, description="steps between checkpoints; 0: only at the end and when stopped"
    )
    keep: PositiveInt = Field(default=2, description="number of newest checkpoints that stay on disk")


class OutputSettings(Section):
    """Files of the run besides checkpoints: metrics.jsonl, settings.yaml, summary.json, traces."""

    folder: str = Field(default="runs/default", min_length=1, description="folder of the run")
    log_interval: NonNegativeInt = Field(default=10, description="steps between lines; 0: nothing is shown")
    tensorboard: bool = Field(
        default=False,
        description="also write the figures of metrics.jsonl as TensorBoard events into the folder `tensorboard`; "
        "needs the package tensorboard",
    )
    trace_steps: list[int] | None = Field(
        default=None,
        description="steps that torch.profiler records for ui.perfetto.dev, a file of each rank in the folder `trace`; "
        "the first step of a run is slower than others; null: none",
    )

    @model_validator(mode="after")
    def _check_trace_steps(self) -> OutputSettings:
        if min(self.trace_steps or [1]) < 1:
            raise bad_value("trace_steps", self.trace_steps, "must be numbers of steps, counted from 1")
        return self


class Sections(Section):
    """All sections of a settings file."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    output: OutputSettings = Field(default_factory=OutputSettings)
    context_parallel_suite: SuiteSettings = Field(default_factory=SuiteSettings)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Read an empty section as a section; name the right section of a key that stands in a wrong one."""
        if not isinstance(values, dict):
            return values
        sections: dict[str, Any] = {name: info.annotation for name, info in cls.model_fields.items()}
        for name, section in values.items():
            if name not in sections:
                raise unknown_key(cls, name, name, sections)
            if not isinstance(section, dict) or section.get("algorithm_modules") is not None:
                continue  # the section reports its keys itself; it may import modules that add some
            for key in section:
                if key not in sections[name].key_names():
                    raise unknown_key(sections[name], f"{name}.{key}", key, sections)
        return {name: {} if section is None else section for name, section in values.items()}

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica: tensor * context."""
        return self.train.tensor_model_parallel_size * self.context_parallel_suite.context_parallel_size

    @property
    def model_sizes(self) -> dict[str, Any]:
        """Sizes of the model, by the names of the options of algorithms that cost linear layers."""
        return {
            "hidden_size": self.model.hidden_size,
            "ffn_hidden_size": self.model.mean_ffn_hidden_size,
            "tensor_model_parallel_size": self.train.tensor_model_parallel_size,
            "sequence_parallel": self.train.sequence_parallel,
        }

    @property
    def plan_options(self) -> dict[str, Any]:
        """Options of build_plan: those of the suite, and sizes of the model if the algorithm costs linear layers."""
        suite, sizes = self.context_parallel_suite, self.model_sizes
        names = sizes if suite.algorithm == AUTO else algorithm_options(suite.algorithm)
        return {**{name: size for name, size in sizes.items() if name in names}, **suite.options}
