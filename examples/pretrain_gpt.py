"""Pretrain a GPT with planned context parallelism in Megatron's own training loop, from 0.12 to 0.19.

::

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --cp-plan suite.yaml --context-parallel-size 4 ...

All arguments are Megatron's and those of mindspeed_cp.megatron.pretrain; `--device cpu`, before them, runs on the CPU.
megatron.training is in the wheels of megatron-core from 0.17 on; for older ones, name a source tree of Megatron-LM of
the same version: MEGATRON_LM=/path/to/Megatron-LM.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron_on_cpu import megatron_training_on_cpu

if "MEGATRON_LM" in os.environ:  # at the end: megatron.core stays the installed one, the tree adds megatron.training
    sys.path.append(os.environ["MEGATRON_LM"])

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.megatron import pretrain as planned

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

#: Fields of GPTDatasetConfig whose arguments have other names.
OTHER_NAMES = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "inter_document_masking": "dataloader_inter_document_masking",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}


def model_provider(pre_process: bool = True, post_process: bool = True, **stage: Any) -> Any:
    """Build the model of a pipeline stage, as Megatron-LM's pretrain_gpt.py does."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args, config = get_args(), core_transformer_config_from_args(get_args())
    accepted = inspect.signature(GPTModel).parameters
    return GPTModel(
        config=config,
        transformer_layer_spec=import_module(args.spec),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=planned.mtp_block_spec(config, args, stage.get("vp_stage")),
        **{name: value for name, value in stage.items() if name in accepted and name != "config"},
    )


def datasets_provider(sample_counts: Any, vp_stage: int | None = None) -> Any:
    """Build Megatron's GPT or SFT data sets for training, validation and test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(**dataset_options(args))
    is_built = partial(planned.is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(dataset_class(args), sample_counts, is_built, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def dataset_class(args: Any) -> Any:
    """Return the class of the data set that the arguments ask for.

    Raises:
        ConfigError: it is that of --fim-data.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    if getattr(args, "fim_data", False):
        raise ConfigError(
            "fim_data is True; valid in this script: False; Megatron-LM's pretrain_gpt.py, changed as docs/megatron.md "
            "says, has the data set of --fim-data"
        )
    if getattr(args, "sft", False):
        from megatron.training.datasets.sft_dataset import SFTDataset

        return SFTDataset
    return MockGPTDataset if args.mock_data else GPTDataset


def dataset_options(args: Any) -> dict[str, Any]:
    """Return the arguments of GPTDatasetConfig, as Megatron-LM's pretrain_gpt.py gives them."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training.utils import get_blend_and_blend_per_split

    names = [field.name for field in fields(GPTDatasetConfig) if field.init]
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    options |= {name: getattr(args, other) for name, other in OTHER_NAMES.items() if hasattr(args, other)}
    counts = getattr(args, "per_dataset_sequences_path", None)
    if counts is not None:
        options["sequences_per_dataset"] = json.loads(Path(counts).read_text("utf-8"))
    options["blend"], options["blend_per_split"] = get_blend_and_blend_per_split(args)
    options["tokenizer"] = _tokenizer(args)
    # Of --sft, which pads documents for Megatron's own way to cut them; a plan cuts documents of any length.
    options["context_parallel_size"] = 1
    return {name: value for name, value in options.items() if name in names}


def _tokenizer(args: Any) -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # 0.19
    except ModuleNotFoundError:
        from megatron.training import get_tokenizer

        return get_tokenizer()
    return build_tokenizer(args)


def train() -> None:
    """Train as the arguments say."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    kind = ModelType.encoder_or_decoder
    if "cfg_container" not in inspect.signature(pretrain).parameters:  # up to 0.16
        pretrain(
            datasets_provider,
            planned.wrap_model_provider(model_provider),
            kind,
            planned.forward_step,
            extra_args_provider=planned.add_arguments,
            args_defaults=DEFAULTS,
        )
        return
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=planned.add_arguments, args_defaults=DEFAULTS)
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(planned.pre_wrap_hook)
    pretrain(pretrain_cfg_container_from_args(args, model), datasets_provider, kind, planned.forward_step)


def leave_groups() -> None:
    """End the process groups of gloo, whose threads would abort a process that exits while they drop a tensor."""
    time.sleep(0.1)  # they need Python's lock for that, with which torch before 2.9 waits for them below
    torch.distributed.destroy_process_group()


def main() -> int:
    """Read --device, and train; return the exit code, 2 if settings cannot be honoured."""
    on_cpu = sys.argv[1:3] == ["--device", "cpu"]
    if on_cpu:
        del sys.argv[1:3]
    try:
        with megatron_training_on_cpu() if on_cpu else nullcontext():
            train()
            if on_cpu:
                leave_groups()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
