"""examples/pretrain_gpt.py: the data sets that arguments ask for, and one line for settings that cannot be honoured."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import megatron_imports

with megatron_imports():
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
FIELDS = {field.name for field in fields(GPTDatasetConfig) if field.init}


@pytest.fixture
def script(run: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module; with a stand-in for megatron.training."""
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("example_pretrain_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    utils: Any = ModuleType("megatron.training.utils")
    utils.get_blend_and_blend_per_split = lambda args: (["data"], None)
    sft: Any = ModuleType("megatron.training.datasets.sft_dataset")
    sft.SFTDataset = type("SFTDataset", (), {})
    for stub in (utils, sft, ModuleType("megatron.training.datasets")):
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(module, "_tokenizer", lambda args: "tokenizer")
    yield module


def arguments(**changes: Any) -> Namespace:
    """Arguments of data sets, each with a value that is no default."""
    values = dict(
        seed=7, seq_length=64, split="8,1,1", data_cache_path="cache", num_dataset_builder_threads=3,
        mmap_bin_files=False, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True, mock_data=False,
        create_attention_mask_in_dataloader=False, multiple_validation_sets=True, full_validation=True,
        s3_cache_path="s3", object_storage_cache_path="objects", mid_level_dataset_surplus=0.5, context_parallel_size=4,
        allow_ambiguous_pad_tokens=True, dataloader_fast_cache_load=True, dataloader_defer_npy_index_mmap=True,
        dataloader_inter_document_masking=True, data_parallel_size=2, hybrid_context_parallel=False,
    )  # fmt: skip
    return Namespace(**{**values, **changes})


def test_no_argument_of_the_data_set_is_dropped(script: Any, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"data": 5}), "utf-8")
    options = script.dataset_options(arguments(per_dataset_sequences_path=str(counts)))
    expected = dict(
        random_seed=7, sequence_length=64, split="8,1,1", path_to_cache="cache", num_dataset_builder_threads=3,
        mmap_bin_files=False, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True,
        create_attention_mask=False, multiple_validation_sets=True, full_validation=True, s3_cache_path="s3",
        object_storage_cache_path="objects", mid_level_dataset_surplus=0.5, allow_ambiguous_pad_tokens=True,
        fast_cache_load=True, defer_npy_index_mmap=True, inter_document_masking=True, blend=["data"],
        blend_per_split=None, tokenizer="tokenizer", sequences_per_dataset={"data": 5}, data_parallel_size=2,
        hybrid_context_parallel=False, context_parallel_size=1,  # a plan needs no padding between documents
    )  # fmt: skip
    assert options == {name: value for name, value in expected.items() if name in FIELDS}
    unset = {"drop_last_partial_validation_sequence", "add_extra_token_to_sequence", "sequence_parallel_size"}
    assert FIELDS - set(options) <= unset  # no argument sets the first two; the third is of hybrid_context_parallel


def test_the_data_set_is_the_one_that_arguments_name(script: Any) -> None:
    assert script.dataset_class(arguments()) is GPTDataset
    assert script.dataset_class(arguments(mock_data=True)) is MockGPTDataset
    assert script.dataset_class(arguments(sft=True)).__name__ == "SFTDataset"
    with pytest.raises(ConfigError, match="fim_data is True; valid in this script: False; Megatron-LM"):
        script.dataset_class(arguments(fim_data=True))


def test_settings_that_cannot_be_honoured_are_one_line_and_exit_code_2(
    script: Any, run: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(cp_plan=None)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    monkeypatch.setattr(script, "train", script.planned.wrap_model_provider(lambda: pytest.fail("built")))
    assert script.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cp_plan is None; pass --cp-plan FILE") and error.count("\n") == 1
    monkeypatch.setattr(script, "train", lambda: None)
    assert script.main() == 0
