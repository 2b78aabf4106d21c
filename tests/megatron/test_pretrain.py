"""What Megatron's own training scripts take: arguments, spec, batches, loss, hooks; with a stand-in for their arguments."""

from __future__ import annotations

import ast
import copy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.megatron import PlannedAttention, megatron_imports, planned_batch, pretrain, shift_labels
from mindspeed_cp.megatron.adaptors import whole_batch
from mindspeed_cp.megatron.adaptors.local import stage_arguments
from mindspeed_cp.megatron.pretrain import losses as pretrain_losses
from tests.megatron.gpt import VOCABULARY, build, transformer_config

with megatron_imports():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

FOLDER = Path(pretrain.__file__).parent
LENGTHS = ((5, 11, 8), (24,))  # of the two rows


class Timer:
    def start(self) -> None: ...
    def stop(self) -> None: ...


@pytest.fixture
def run(monkeypatch: Any, tmp_path: Path) -> Iterator[Callable[..., Namespace]]:
    """A function that sets the arguments of Megatron's script and returns them."""
    path = tmp_path / "suite.yaml"
    path.write_text("context_parallel_suite:\n  algorithm: ring\n", "utf-8")
    module: Any = ModuleType("megatron.training")
    arguments: Any = ModuleType("megatron.training.arguments")

    def start(**changes: Any) -> Namespace:
        values: dict[str, Any] = dict(
            cp_plan=str(path), cp_plan_set=[], context_parallel_size=1, tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, sequence_parallel=False,
            expert_model_parallel_size=1, num_experts=None, multi_latent_attention=False, q_lora_rank=None,
            reset_position_ids=True, reset_attention_mask=True, create_attention_mask_in_dataloader=False,
            calculate_per_token_loss=True, apply_rope_fusion=False, cp_comm_type=["p2p"], position_embedding_type="rope",
            transformer_impl="local", attention_backend="auto", yaml_cfg=None, seed=3, curr_iteration=0, sft=False,
            spec=None, check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False, variable_seq_lengths=False,
        )  # fmt: skip
        namespace = Namespace(**{**values, **changes})
        module.get_args = lambda: namespace
        module.get_timers = lambda: lambda name, log_level=0: Timer()
        arguments.core_transformer_config_from_args = lambda args: transformer_config()
        return namespace

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, arguments.__name__, arguments)
    start()
    yield start


def rows() -> dict[str, torch.Tensor]:
    """A micro-batch as Megatron's data set gives it, and positions that restart in every document."""
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    labels, mask = shift_labels(tokens, Documents([n for row in LENGTHS for n in row]))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def test_importing_needs_no_megatron_training() -> None:
    files = list(FOLDER.glob("*.py"))
    assert len(files) > 5
    for file in files:
        body = ast.parse(file.read_text("utf-8")).body
        modules = [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in modules if name.startswith("megatron.training")], file.name


def test_the_parser_takes_the_plan() -> None:
    parser = pretrain.add_arguments(ArgumentParser())
    args = parser.parse_args(["--cp-plan", "suite.yaml", "--cp-plan-set", "algorithm=ulysses", "nodes=2"])
    assert (args.cp_plan, args.cp_plan_set) == ("suite.yaml", ["algorithm=ulysses", "nodes=2"])
    assert parser.parse_args([]).cp_plan is None and not parser.parse_args([]).cp_plan_documents
    assert parser.parse_args(["--cp-plan-documents"]).cp_plan_documents


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
        (dict(cp_plan_set=["algorithm=auto"]), "algorithm is 'auto'.*`mindspeed-cp plan`"),
        (dict(cp_plan_set=["candidates=[ulysses]"]), "candidates is .*one algorithm by name"),
        (dict(reset_position_ids=False), "attention would cross them"),
        (dict(reset_attention_mask=False), "True with --reset-position-ids"),
        (
            dict(reset_position_ids=False, cp_plan_documents=True),
            "cp_plan_documents is True; valid: False, or together",
        ),
    ],
)
def test_settings_that_scripts_cannot_take_are_refused(
    run: Callable[..., Namespace], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain.suite_of(run(**changes))


def test_documents_may_be_told_without_megatrons_flag_for_masks(run: Callable[..., Namespace]) -> None:
    assert pretrain.suite_of(run(reset_attention_mask=False, cp_plan_documents=True)).algorithm == "ring"


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


def test_a_wrapped_provider_installs_the_model(run: Callable[..., Namespace], alone: None) -> None:
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


def test_a_wrapped_provider_checks_arguments_before_it_builds(run: Callable[..., Namespace]) -> None:
    run(calculate_per_token_loss=False)
    with pytest.raises(ConfigError, match="pass --calculate-per-token-loss"):
        pretrain.wrap_model_provider(lambda **_: pytest.fail("built"))(pre_process=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_is_the_rows_of_the_plan_of_its_documents(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any, rank: int
) -> None:
    run(context_parallel_size=2)
    monkeypatch.setattr(whole_batch.parallel_state, "get_context_parallel_rank", lambda: rank)
    batch, params = pretrain.get_batch(iter([rows()]), transformer_config(cp=2))
    assert params.plan is not None and params.rank == rank
    assert params.plan.documents.lengths.tolist() == [5, 11, 8, 24]
    whole = rows()
    del whole["position_ids"]
    expected, _ = planned_batch({key: value.reshape(-1) for key, value in whole.items()}, params.plan, rank)
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(batch[name], value), name


@pytest.mark.parametrize("filled", [False, True], ids=["one row of ends", "filled up with the length of the row"])
def test_documents_of_supervised_fine_tuning_are_those_of_cu_seqlens(
    run: Callable[..., Namespace], alone: None, filled: bool
) -> None:
    run(sft=True, reset_position_ids=False, reset_attention_mask=False)
    whole = rows()
    ends = [np.cumsum([0, *lengths]).tolist() for lengths in LENGTHS]
    if filled:  # 0.19: as long as the longest row of ends
        table = torch.tensor([row + [24] * (25 - len(row)) for row in ends], dtype=torch.int32)
    else:  # 0.16: one row, micro-batch size 1
        whole = {name: value[:1] for name, value in whole.items()}
        table = torch.tensor(ends[:1], dtype=torch.int32)
    _, params = pretrain.get_batch(
        iter([{**whole, "cu_seqlens": table, "max_seqlen": torch.tensor([11])}]), transformer_config()
    )
    assert params.plan is not None
    assert params.plan.documents.lengths.tolist() == [5, 11, 8] + [24] * filled


def test_rows_without_documents_are_one_each(run: Callable[..., Namespace], alone: None) -> None:
    run(reset_position_ids=False, reset_attention_mask=False)
    whole = {**rows(), "position_ids": torch.arange(24).repeat(2, 1)}
    _, params = pretrain.get_batch(iter([whole]), transformer_config())
    assert params.plan is not None and params.plan.documents.lengths.tolist() == [24, 24]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(attention_mask=torch.ones(2, 1, 24, 24)), "--no-create-attention-mask-in-dataloader"),
        (dict(labels=None), r"lacks \['labels'\]"),
        (dict(local_cp_size=torch.tensor(1)), "would drop"),
        (dict(cu_seqlens=torch.tensor([[0, 12, 24], [0, 12, 24]], dtype=torch.int32)), "valid: the same"),
    ],
)
def test_a_batch_that_cannot_be_planned_is_refused(
    run: Callable[..., Namespace], alone: None, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain.get_batch(iter([{**rows(), **changes}]), transformer_config())


def test_a_stage_without_data_is_told_what_to_change(run: Callable[..., Namespace], alone: None) -> None:
    assert pretrain.is_dataset_built_on_rank(vp_stage=1)
    with pytest.raises(ConfigError, match="use is_dataset_built_on_rank of mindspeed_cp"):
        pretrain.get_batch(None, transformer_config())


def test_dropout_differs_between_steps_and_batches_alone(run: Callable[..., Namespace], alone: None) -> None:
    config = transformer_config(attention_dropout=0.1)
    other = {**rows(), "tokens": rows()["tokens"].flip(1)}

    def seed(iteration: int, batch: dict[str, torch.Tensor]) -> int | None:
        run(curr_iteration=iteration)
        return pretrain.get_batch(iter([batch]), config)[1].dropout_seed

    assert seed(1, rows()) == seed(1, rows()) is not None
    assert len({seed(1, rows()), seed(2, rows()), seed(1, other)}) == 3


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


@pytest.mark.parametrize("sft", [False, True])
@pytest.mark.parametrize("sums", [False, True])
def test_a_report_is_summed_where_the_loop_does_not(
    run: Callable[..., Namespace], alone: None, monkeypatch: Any, sums: bool, sft: bool
) -> None:
    run(sft=sft)
    monkeypatch.setattr(pretrain_losses.SPAN, "LOOP_SUMS_REPORTS", sums)
    monkeypatch.setattr(pretrain_losses.dist, "all_reduce", lambda tensor, group: tensor.mul_(2))  # two equal ranks
    total, count, report = pretrain.loss_func(torch.ones(1, 3), torch.tensor([[1.0, 2.0, 4.0]]))
    assert (total.item(), int(count)) == (7.0, 3)
    assert isinstance(report["lm loss"], torch.Tensor) == sums
    factor = 1 if sums and not sft else 2
    assert [float(value) for value in report["lm loss"]] == [7.0 * factor, 3.0 * factor]
