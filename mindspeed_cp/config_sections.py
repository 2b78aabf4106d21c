"""The sections of the settings that are not about context parallelism: model, data, training, what is kept on disk.

Ideas that Megatron has too carry the key names of its TransformerConfig and of its command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_cp.config_errors import one_line

LARGE = 10**9  # no setting is larger in earnest, and what counts in 64 bits further on does not overflow

Count = Annotated[int, Field(ge=1, le=LARGE)]
Natural = Annotated[int, Field(ge=0, le=LARGE)]
Positive = Annotated[float, Field(gt=0, le=LARGE)]
NotNegative = Annotated[float, Field(ge=0, le=LARGE)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A strict, frozen section: no unknown keys, no conversions (the text "3" is not the number 3), no infinities.

    Whatever is wrong is a ConfigError of one line, also where a section is made in Python.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise one_line(type(self), error) from None


class ModelSettings(Section):
    """The GPT, in the words of Megatron's TransformerConfig."""

    num_layers: Count = Field(default=4, description="transformer layers")
    hidden_size: Count = Field(default=256, description="width of the residual stream")
    num_attention_heads: Count = Field(default=8, description="query heads")
    num_query_groups: Count | None = Field(default=None, description="key/value heads; null: as many as query heads")
    kv_channels: Count | None = Field(
        default=None, description="width of a head; null: hidden_size / num_attention_heads"
    )
    ffn_hidden_size: Count | None = Field(
        default=None, description="width inside the MLP; null: 4 * hidden_size, with swiglu 8/3 of it in steps of 64"
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = Field(default="RMSNorm", description="kind of norm")
    swiglu: bool = Field(default=True, description="gated SiLU in the MLP; false: GELU")
    add_bias_linear: bool = Field(default=False, description="biases in the linear layers")
    position_embedding_type: Literal["rope", "none"] = Field(
        default="rope", description="rope: rotary positions, counted from 0 in each document"
    )
    rotary_base: Count = Field(default=10000, description="base of the rotary frequencies")
    untie_embeddings_and_output_weights: bool = Field(
        default=False, description="a matrix of its own for the output layer"
    )
    init_method_std: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the initial weights"
    )
    recompute_granularity: Literal["selective", "full"] | None = Field(
        default=None,
        description="recompute in the backward: selective: core attention, full: whole layers, null: nothing",
    )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, int(self.hidden_size * 8 / 3) // 64 * 64) if self.swiglu else 4 * self.hidden_size


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
    bf16: bool = Field(
        default=False, description="bfloat16 weights and activations with fp32 main weights; false: fp32"
    )
    seed: Natural = Field(default=1234, description="seed of the weights and of the order of the documents")
    tensor_model_parallel_size: Count = Field(default=1, description="ranks that share each matrix")
    pipeline_model_parallel_size: Count = Field(
        default=1, description="ranks that share the layers; only 1 in this version"
    )
    use_distributed_optimizer: bool = Field(default=False, description="spread the optimizer's state over the ranks")
    prefetch: Count = Field(default=2, description="micro-batches packed and planned ahead, in a thread of each rank")
    threads_per_rank: Count | None = Field(
        default=None, description="CPU threads of a rank; null: the cores shared out"
    )
    max_restarts: Natural = Field(
        default=0, description="how often all ranks are started again, and resume, after one died"
    )


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
    """What the run writes besides checkpoints: metrics.jsonl, loss.png, settings.yaml, summary.json."""

    folder: str = Field(default="runs/default", min_length=1, description="folder of this run's files")
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        default="auto", description="auto: a bar on a terminal, lines elsewhere"
    )
    log_interval: Count = Field(default=10, description="steps between lines, where there is no bar")
