"""What Megatron's training scripts take: arguments, spec, batches, loss, hooks; with a stand-in for their arguments."""

from __future__ import annotations

import ast
import copy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.cli.case import read_case
from mindspeed_cp.cli.options import SimulateOptions
from mindspeed_cp.megatron import PlannedAttention, megatron_imports, pretrain
from mindspeed_cp.megatron.adaptors.spec import stage_arguments
from mindspeed_cp.megatron.pretrain import layers, step
from mindspeed_cp.megatron.pretrain.layers import print_banner
from tests.megatron.gpt import VOCABULARY, Suite, build, transformer_config
from tests.megatron.models import NEEDS_PACKED
from tests.megatron.script_arguments import TABLE, rows

with megatron_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

FOLDER = Path(pretrain.__file__).parent


def test_importing_needs_no_megatron_training() -> None:
    files = list(FOLDER.glob("*.py"))
    assert len(files) > 4
    for file in files:
        body = ast.parse(file.read_text("utf-8")).body
        modules = [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in modules if name.startswith("megatron.training")], file.name


def test_the_parser_takes_the_plan() -> None:
    parser = pretrain.add_arguments(ArgumentParser())
    one_flag = ["--cp-plan-set", "algorithm=ulysses", "nodes=2"]
    for words in (one_flag, ["--cp-plan-set", "algorithm=ulysses", "--cp-plan-set", "nodes=2"]):
        args = parser.parse_args(["--cp-plan", "suite.yaml", *words])
        assert (args.cp_plan, args.cp_plan_set) == ("suite.yaml", ["algorithm=ulysses", "nodes=2"])
    assert parser.parse_args([]).cp_plan is None
    assert parser.parse_args(["--cp-plan-documents"]).cp_plan_documents and not args.cp_plan_documents


def test_the_size_is_megatrons_where_the_file_has_none(run: Callable[..., Namespace], tmp_path: Path) -> None:
    assert pretrain.suite_of(run(context_parallel_size=4)).context_parallel_size == 4
    assert pretrain.suite_of(run(cp_plan_set=["algorithm=ulysses"])).algorithm == "ulysses"
    alone = tmp_path / "alone.yaml"
    alone.write_text("algorithm: direct\n", "utf-8")
    suite = pretrain.suite_of(run(cp_plan=str(alone), context_parallel_size=2))
    assert (suite.algorithm, suite.context_parallel_size) == ("direct", 2)
    alone.write_text("algorithm: hybrid\ncontext_parallel_size: 8\n", "utf-8")
    with pytest.raises(ConfigError, match="context_parallel_size is 2 on the command line, but 8"):
        pretrain.suite_of(run(cp_plan=str(alone), cp_plan_set=["nodes=2"], context_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(cp_plan=None), "pass --cp-plan FILE"),
        (dict(cp_plan="nosuch.yaml"), "^--cp-plan nosuch.yaml: no such file; .*context_parallel_suite"),
        (dict(cp_plan_set=["algorithm=auto"]), "algorithm is 'auto'.*`mindspeed-cp simulate --choose`"),
        (dict(reset_position_ids=False), "attention would cross them"),
        (dict(cp_plan_set=["p2p_groups=directional"]), "p2p_groups is 'directional'; valid .* 'auto' or 'batched'"),
        (dict(cp_plan_set=["ulysses_degree=3"]), "^--cp-plan-set: .*ulysses_degree"),
        (
            dict(cp_plan_set=["cluster=a9"]),
            '^--cp-plan-set: .*cluster = "a9": cannot be used: cluster .a9.: no such preset; .*valid: a2, ',
        ),
        (dict(cp_plan_set=["hccl_buffer_mb=50"]), "hccl_buffer_mb is 50; valid .* null.*set HCCL_BUFFSIZE"),
        (dict(reset_attention_mask=False), "True with --reset-position-ids"),
        (
            dict(reset_position_ids=False, cp_plan_documents=True),
            "cp_plan_documents is True; valid .*False, or together",
        ),
    ],
)
def test_settings_that_scripts_cannot_take_are_refused(
    run: Callable[..., Namespace], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain.suite_of(run(**changes))


def test_the_spec_is_an_object_that_is_built_when_megatron_reads_it(run: Callable[..., Namespace], alone: None) -> None:
    spec = import_module(["mindspeed_cp.megatron.pretrain", "spec"])
    assert spec is pretrain.spec and isinstance(spec, TransformerBlockSubmodules) and callable(spec)
    assert repr(spec) == "mindspeed_cp.megatron.pretrain.spec" and copy.deepcopy(spec) is spec
    model = build(transformer_config(), spec)
    assert sum(isinstance(module, PlannedAttention) for module in model.modules()) == 2
    called = spec(transformer_config())
    assert not isinstance(called, pretrain.PlannedLayers) and len(called.layer_specs) == len(spec.layer_specs) == 2
    weights = build(transformer_config(), called).state_dict()
    assert weights.keys() == model.state_dict().keys() and len(weights) > 10


@pytest.mark.skipif(not stage_arguments(get_gpt_decoder_block_spec, 0), reason="this Megatron knows the virtual stage")
def test_interleaved_stages_need_the_wrapped_provider(run: Callable[..., Namespace]) -> None:
    run(virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match="wrap_model_provider"):
        assert pretrain.spec.layer_specs


def test_a_wrapped_provider_installs_the_model(
    run: Callable[..., Namespace], alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    args = run()
    calls = []

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
        calls.append((pre_process, vp_stage, args.variable_seq_lengths))
        return build(transformer_config(), pretrain.spec, pre_process=pre_process)

    model = pretrain.wrap_model_provider(provider)(pre_process=True, post_process=True, vp_stage=None)
    assert calls == [(True, None, False)]
    assert import_module(args.spec) is pretrain.spec
    assert all(m.installed for m in model.modules() if isinstance(m, PlannedAttention))
    other = build(transformer_config(), pretrain.spec)
    assert pretrain.pre_wrap_hook([other]) == [other]
    assert all(m.installed for m in other.modules() if isinstance(m, PlannedAttention))
    line = (
        "mindspeed-cp: ring over 1 context-parallel ranks; 2 layers: causal; documents: where positions restart "
        "(--reset-position-ids)"
    )
    told = capsys.readouterr().out.splitlines()
    assert told[::2] == [line, line] and told[1] == told[3]
    _, _, words = told[1].partition("--lengths LENGTHS ")
    case, _ = read_case(SimulateOptions(lengths="700,30", overrides=words.replace("--set ", "").split()))
    config = transformer_config()
    assert (case.attention.heads, case.layer.hidden_size) == (config.num_attention_heads, config.hidden_size)
    assert case.layer.bytes_per_element == 4 and case.attention.kv_heads == config.num_query_groups


def test_the_banner_names_the_attention_of_the_layers(
    run: Callable[..., Namespace], alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    args = run(reset_position_ids=False, reset_attention_mask=False)
    config = transformer_config(num_layers=3, window_size=(3, 0), window_attn_skip_freq=[0, 1, 0])
    config.attention_dropout = 0.25
    model = build(config, pretrain.spec(config))
    suite = Suite(context_parallel_size=4, algorithm="double_ring", cp_window_size=2)
    flags = {"": "each row of Megatron's data sets is one", "sft": "by cu_seqlens (--sft)"}
    flags["dataloader_inter_document_masking"] = "by cu_seqlens (--dataloader-inter-document-masking)"
    for name, documents in flags.items():
        print_banner([model], Namespace(**{**vars(args), name: True}), suite)
        assert capsys.readouterr().out.splitlines()[0] == (
            "mindspeed-cp: double_ring, cp_window_size 2 over 4 context-parallel ranks; 2 layers: causal, dropout 0.25; "
            f"1 layer: causal, window (3, 0), dropout 0.25; documents: {documents}"
        )


@NEEDS_PACKED
def test_megatrons_builder_gets_planned_layers_of_later_tokens(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any
) -> None:
    args = run(mtp_num_layers=1, spec=list(layers.SPEC))
    config = transformer_config(mtp_num_layers=1)
    builders: Any = ModuleType("gpt_builders")
    builders.GPTModel = GPTModel
    monkeypatch.setitem(sys.modules, builders.__name__, builders)
    specs = []

    def gpt_builder() -> Any:
        specs.append(args.spec)
        return builders.GPTModel(
            config=config, transformer_layer_spec=None, vocab_size=VOCABULARY, max_sequence_length=64,
            position_embedding_type="rope", mtp_block_spec=None, vp_stage=None,
        )  # fmt: skip

    model = pretrain.wrap_model_provider(gpt_builder)()
    assert builders.GPTModel is GPTModel and args.spec == list(layers.SPEC) and specs == [None]
    assert [m.number_in_model for m in model.modules() if isinstance(m, PlannedAttention)] == [1, 2, 3]
    losses, _ = pretrain.forward_step(iter([rows()]), model)
    assert losses.isfinite().all()
    args.spec = ["layers of the script", "spec"]
    with pytest.raises(Exception, match="NoneType"):  # Megatron's own GPTModel, which gets no layers here
        pretrain.wrap_model_provider(gpt_builder)()
    assert specs[1] == args.spec


def test_a_wrapped_provider_checks_arguments_before_it_builds(run: Callable[..., Namespace]) -> None:
    run(calculate_per_token_loss=False)
    with pytest.raises(ConfigError, match="pass --calculate-per-token-loss"):
        pretrain.wrap_model_provider(lambda **_: pytest.fail("built"))(pre_process=True)


def test_batch_and_model_are_timed_for_megatrons_detector_of_slow_ranks(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any
) -> None:
    watch = MagicMock()
    monkeypatch.setattr(step.StragglerDetector, "_instance", watch)
    model = pretrain.wrap_model_provider(lambda: build(transformer_config(), pretrain.spec))()
    pretrain.forward_step(iter([rows()]), model)
    entered = [timed for timed in watch.mock_calls if "enter" in str(timed)]
    assert entered == [call().__enter__(), call.__enter__()] and call(bdata=True) in watch.mock_calls


def test_megatron_is_told_the_lengths_of_documents_in_training(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any
) -> None:
    loop: Any = ModuleType("megatron.training.training")
    told: list[list[int]] = []
    loop.update_seqlen_stats_from_cu_seqlens = lambda ends: told.append(ends.tolist())
    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    model = pretrain.wrap_model_provider(lambda: build(transformer_config(), pretrain.spec))()
    pretrain.forward_step(iter([rows()]), model)  # documents of --reset-position-ids: Megatron counts whole rows
    run(sft=True, reset_position_ids=False, reset_attention_mask=False)
    pretrain.forward_step(iter([{**rows(), "cu_seqlens": TABLE}]), model)
    pretrain.forward_step(iter([{**rows(), "cu_seqlens": TABLE}]), model.eval())
    assert told == [[0, 5, 16, 24, 48]]


def test_a_forward_step_gives_the_loss_of_the_micro_batch(run: Callable[..., Namespace], alone: None) -> None:
    model = pretrain.wrap_model_provider(lambda: build(transformer_config(), pretrain.spec))()
    losses, function = pretrain.forward_step(iter([rows()]), model)
    total, count, report = function(losses)
    mask = rows()["loss_mask"].reshape(-1)
    assert int(count) == int(mask.sum()) == 44
    np.testing.assert_allclose(total.item(), (losses.reshape(-1) * mask).sum().item(), rtol=1e-6)
    assert [float(value) for value in report["lm loss"]] == [total.item(), 44]
    with pytest.raises(ConfigError, match="--overlap-moe-expert-parallel-comm"):
        pretrain.forward_step(iter([rows()]), model, return_schedule_plan=True)


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "found NaN"), (float("inf"), "found Inf")])
def test_a_loss_that_is_no_number_stops_the_run_if_it_is_checked(
    run: Callable[..., Namespace], alone: None, value: float, words: str
) -> None:
    losses = torch.tensor([[1.0, value]])
    with pytest.raises(Exception, match=words):
        pretrain.loss_func(torch.ones(1, 2), losses)
    run(check_for_nan_in_loss_and_grad=False)
    assert not pretrain.loss_func(torch.ones(1, 2), losses)[0].isfinite()


@pytest.mark.parametrize(
    ("sft", "training", "averaged"),
    [
        (False, False, False),
        (True, True, False),
        (True, False, True),
        (True, None, True),  # no model to ask
    ],
)
@pytest.mark.parametrize("sums", [False, True])
def test_a_report_is_summed_where_the_loop_does_not(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any, sums: bool, sft: bool, training: bool | None,
    averaged: bool,
) -> None:  # fmt: skip
    run(sft=sft)
    model = None if training is None else torch.nn.Identity().train(training)
    monkeypatch.setattr(step.versions, "SUMS_OVER_RANKS", sums)
    monkeypatch.setattr(step.dist, "all_reduce", lambda tensor, group: tensor.mul_(2))  # two equal ranks
    total, count, report = pretrain.loss_func(torch.ones(1, 3), torch.tensor([[1.0, 2.0, 4.0]]), model)
    assert (total.item(), int(count)) == (7.0, 3)
    assert isinstance(report["lm loss"], torch.Tensor) == sums
    factor = 2 if averaged or not sums else 1
    assert [float(value) for value in report["lm loss"]] == [7.0 * factor, 3.0 * factor]
