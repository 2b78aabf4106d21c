"""--cp-plan-planner: one rank of a machine plans for the others in Megatron's scripts; the same bits, and errors on all."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_cp import ConfigError, Documents, PlanError, build_plan, verify_plan
from mindspeed_cp.algorithms import plan_cache as cached_plans
from mindspeed_cp.data.pool import PoolModel
from mindspeed_cp.engine import check_agreement
from mindspeed_cp.errors import PeerError
from mindspeed_cp.megatron import install, install_model, layer_attentions, loss_function, megatron_imports, pretrain
from mindspeed_cp.megatron.adaptors import plan_sharing
from mindspeed_cp.megatron.adaptors.packed import plan_cache
from mindspeed_cp.plan_sharing import node_ranks, sharing
from tests.limits import HANG
from tests.megatron.gpt import VOCABULARY, build, layer_spec, megatron, transformer_config
from tests.megatron.ranks import MegatronRanks
from tests.megatron.script_arguments import stand_in
from tests.megatron.test_trajectories import trajectories

with megatron_imports():
    from megatron.core import parallel_state

#: Lengths of the documents of two rows, of two replicas and three micro-batches; the third has those of the first.
LENGTHS = [(((5, 11, 8), (24,)), ((1, 23), (12, 12))), (((24,), (2, 22)), ((20, 4), (3, 3, 18)))]
LENGTHS.append(LENGTHS[0])
SEARCHED = {"cp_plan_set": ["algorithm=hierarchical"]}
CP4: dict[str, Any] = {**SEARCHED, "context_parallel_size": 4}


def micro_batch(replica: int, number: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a replica; other tokens in each."""
    lengths = LENGTHS[number][replica]
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(10 * number + replica))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    mask = torch.cat([torch.tensor([1.0] * (n - 1) + [0.0]) for row in lengths for n in row]).reshape(2, 24)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask, "position_ids": positions}


@contextmanager
def script(rank: int, path: str, machine: int = 4, **arguments: Any) -> Iterator[tuple[Namespace, Any, dict[str, int]]]:
    """Megatron's script on one of 4 ranks, on machines of so many ranks with a core each; its micro-batches are in turn
    those of the pool and of replicas where that is asked for.

    Yields:
        its arguments, the model's settings, and how many plans this rank builds and proves, and chooses for the pool.
    """
    modules, start = stand_in(path)
    counts = {"built": 0, "proved": 0, "chosen": 0}
    choose = PoolModel.choose

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*given, **options)

        return call

    def in_turn(*given: Any) -> Any:
        return replace(choose(*given), pools=counts["chosen"] % 2)

    args = start(**arguments)
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    with pytest.MonkeyPatch.context() as patch, megatron(tp=tp, cp=cp, pp=args.pipeline_model_parallel_size):
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setenv("LOCAL_RANK", str(rank % machine))
        patch.setenv("LOCAL_WORLD_SIZE", str(machine))
        patch.setattr(node_ranks.socket, "gethostname", lambda: f"machine {rank // machine}")
        patch.setattr(plan_sharing, "usable_cores", lambda: machine)
        for module in (sharing, cached_plans):
            patch.setattr(module, "build_plan", counted("built", build_plan))
        patch.setattr(plan_sharing, "verify_plan", counted("proved", verify_plan))
        patch.setattr(PoolModel, "choose", counted("chosen", in_turn))
        plan_cache.cache_clear()
        yield args, transformer_config(tp=tp, cp=cp), counts


# the same bits


def trained(rank: int, group: None, path: str, machine: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a model forward and backward on three micro-batches."""
    with script(rank, path, machine, **arguments) as (args, config, counts):
        model = install_model(build(config, install(layer_spec(config), pretrain.suite_of(args))))
        replica = parallel_state.get_data_parallel_rank()
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        data = iter([micro_batch(replica, number) for number in range(3)]) if first else None
        losses = []
        for _ in range(3):
            batch, params = pretrain.get_batch(data, config)
            rows = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
            total, _, _ = loss_function(batch["loss_mask"], rows)
            total.backward()
            losses.append((params.pooled, params.rank, total.item()))
        gradients = [x.grad.numpy() for x in model.parameters() if x.grad is not None]
        return {"losses": losses, "gradients": gradients, **counts}


@pytest.mark.parametrize(
    ("machine", "built", "arguments"),
    [
        pytest.param(4, [2, 0, 0, 0], CP4, id="4 context-parallel ranks"),
        pytest.param(2, [2, 0, 2, 0], CP4, id="2 machines"),
        pytest.param(4, [2, 0, 0, 0], {**SEARCHED, "tensor_model_parallel_size": 2, "context_parallel_size": 2}, id="tp"),
        pytest.param(
            4, [2, 0, 1, 0], {**SEARCHED, "context_parallel_size": 2, "cp_plan_pool": True}, id="pool and replicas"
        ),
    ],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_ranks_that_plan_alone(
    ranks: MegatronRanks, plan_file: str, machine: int, built: list[int], arguments: dict[str, Any]
) -> None:
    """Not a bit differs. The third micro-batch has the lengths of the first, whose plans are kept."""
    alone = ranks.run(4, trained, plan_file, machine, {**arguments, "cp_plan_planner": "replicated"})
    shared = ranks.run(4, trained, plan_file, machine, {**arguments, "cp_plan_planner": "node"})
    for own, given in zip(alone, shared, strict=True):
        assert own["losses"] == given["losses"]
        assert len(own["gradients"]) > 10 and all(map(np.array_equal, own["gradients"], given["gradients"]))
    assert [result["built"] for result in alone] == [2] * 4
    assert [result["built"] for result in shared] == built, "with a pool, rank 2 plans for its replica alone"
    if "cp_plan_pool" in arguments:
        assert [pooled for pooled, _, _ in shared[0]["losses"]] == [True, False, True]
        assert [result["losses"][0][1] for result in shared] == [0, 1, 2, 3]
        assert [result["chosen"] for result in alone] == [3] * 4
        assert [result["chosen"] for result in shared] == [3, 0, 0, 0]


def chosen_by_most(rank: int, group: None, path: str) -> bool:
    """Plan a micro-batch, for which all ranks but one choose the pool; True if it is of the pool."""
    pool = {**SEARCHED, "context_parallel_size": 2, "cp_plan_pool": True, "cp_plan_planner": "replicated"}
    with script(rank, path, **pool) as (_, config, _), pytest.MonkeyPatch.context() as patch:
        choose = PoolModel.choose
        patch.setattr(PoolModel, "choose", lambda *given: replace(choose(*given), pools=int(rank != 2)))
        _, params = pretrain.get_batch(iter([micro_batch(parallel_state.get_data_parallel_rank(), 0)]), config)
        return bool(params.pooled)


def test_the_pool_is_taken_only_if_all_ranks_choose_it(ranks: MegatronRanks, plan_file: str) -> None:
    """Machines may round differently; nobody waits for rows that others do not send."""
    assert ranks.run(4, chosen_by_most, plan_file) == [False] * 4


def trained_on_trees(rank: int, group: None, path: str, planner: str) -> tuple[list[float], int]:
    """Losses of trajectories, and the number of plans that this rank built."""
    own: dict[str, Any] = dict(reset_position_ids=False, reset_attention_mask=False, cp_plan_planner=planner)
    with script(rank, path, **CP4, **own) as (args, config, counts):
        model = install_model(build(config, install(layer_spec(config), pretrain.suite_of(args))))
        losses = []
        for seed in (1, 2):
            listed, weights = trajectories(seed)
            batch, params = pretrain.get_trajectory_batch(Documents.from_trajectories(listed), weights, config)
            logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=params)
            losses.append(pretrain.trajectory_loss_func(batch, model, logits)[0].item())
        return losses, counts["built"]


def test_trajectories_take_the_plans_of_one_rank(ranks: MegatronRanks, plan_file: str) -> None:
    alone = ranks.run(4, trained_on_trees, plan_file, "replicated")
    shared = ranks.run(4, trained_on_trees, plan_file, "node")
    assert [losses for losses, _ in alone] == [losses for losses, _ in shared]
    assert [built for _, built in alone] == [2] * 4 and [built for _, built in shared] == [2, 0, 0, 0]


def built_by_stages(rank: int, group: None, path: str) -> int:
    """Plan two micro-batches, on the second of two pipeline stages after the first has sent them."""
    stages = dict(pipeline_model_parallel_size=2, context_parallel_size=2, cp_plan_planner="node")
    with script(rank, path, **SEARCHED, **stages) as (_, config, counts):
        rows = torch.zeros(1)
        for number in range(2):
            if parallel_state.is_pipeline_first_stage():
                pretrain.get_batch(iter([micro_batch(0, number)]), config)
                dist.send(rows, rank + 2)
            else:
                dist.recv(rows, rank - 2)
                pretrain.get_batch(iter([micro_batch(0, number)]), config)
        return counts["built"]


def test_no_pipeline_stage_waits_for_a_later_one(ranks: MegatronRanks, plan_file: str) -> None:
    assert ranks.run(4, built_by_stages, plan_file) == [2, 0, 2, 0], "each stage has a planner"


# errors


def error_of(rank: int, group: None, path: str, fault: str) -> tuple[str, str]:
    """Kind and text of the error of a rank: of its second micro-batch, or of the comparison with the other ranks."""
    machine = 3 if fault == "machine" else 4  # four ranks on machines of three: the last is alone
    keys = ["algorithm=hierarchical", f"verify_plans={'true' if fault == 'proof' else 'false'}"]
    if fault == "option" and rank == 3:
        keys.append("max_seqlen_per_dp_cp_rank=12")
    with (
        script(rank, path, machine, **{**CP4, "cp_plan_set": keys, "cp_plan_planner": "node"}) as (
            _,
            config,
            counts,
        ),
        pytest.MonkeyPatch.context() as patch,
    ):
        numbers = [0, 1]
        if fault == "plan":
            patch.setattr(sharing, "build_plan", fails_later(sharing.build_plan, ConfigError("no placement")))
        elif fault == "proof":
            patch.setattr(plan_sharing, "verify_plan", fails_later(plan_sharing.verify_plan, PlanError("no proof")))
        elif fault == "documents" and rank == 1:
            numbers = [0, 0]
        elif fault == "launcher" and rank == 2:
            patch.delenv("LOCAL_WORLD_SIZE")
        try:
            for number in numbers:
                _, params = pretrain.get_batch(iter([micro_batch(0, number)]), config)
            check_agreement(params.plan, torch.float32, timeout=HANG)
        except Exception as error:
            return type(error).__name__, str(error)
        return "", str(counts["proved"])


def fails_later(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """A function whose second call fails."""
    calls: list[int] = []

    def call(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return function(*given, **options)

    return call


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("plan", "ConfigError", "^no placement$"),
        ("proof", "PlanError", "^no proof$"),
        ("documents", "ConfigError", "do not have the same plan: documents: rank 1 has"),
        ("option", "ConfigError", "do not have the same plan: .*rank 3 has"),
        ("launcher", "ConfigError", "cp_plan_planner is 'node', but .*; valid here: replicated, or auto"),
        ("machine", "", "^0$"),
    ],
)
def test_all_ranks_raise_the_error_of_the_planner_or_name_the_rank_that_differs(
    ranks: MegatronRanks, plan_file: str, fault: str, kind: str, words: str
) -> None:
    errors = ranks.run(4, error_of, plan_file, fault)
    assert [name for name, _ in errors] == [kind] * 4, errors
    for _, text in errors:
        assert re.search(words, text), text


def proofs(rank: int, group: None, path: str, planner: str) -> int:
    keys = ["algorithm=hierarchical", "verify_plans=true"]
    with script(rank, path, **{**CP4, "cp_plan_set": keys, "cp_plan_planner": planner}) as (_, config, counts):
        for number in range(3):
            pretrain.get_batch(iter([micro_batch(0, number)]), config)
        return counts["proved"]


def test_the_planner_proves_its_plans(ranks: MegatronRanks, plan_file: str) -> None:
    assert ranks.run(4, proofs, plan_file, "node") == [2, 0, 0, 0]


def waits_for_a_rank(rank: int, group: None, path: str) -> str:
    with script(rank, path, **CP4) as (args, config, _):
        shared = plan_sharing.open_plan_sharing(pretrain.settings_of(args), "node", seconds=0.1)
        assert shared is not None
        message = ""
        if rank:
            with pytest.raises(PeerError) as caught:
                shared.plans(Documents([8]), pretrain.settings_of(args).topology, layer_attentions(config), "ring", {})
            message = str(caught.value)
        dist.barrier()
        return message


def test_a_rank_waits_for_its_planner_no_longer_than_it_may(ranks: MegatronRanks, plan_file: str) -> None:
    messages = ranks.run(4, waits_for_a_rank, plan_file)
    for rank in (1, 2, 3):
        assert f"rank {rank} lost rank 0 of the same machine" in messages[rank]
        assert "it did not answer within 0.1 s" in messages[rank]


# when


def is_shared(rank: int, group: None, path: str, planner: str, keys: list[str], cores: int) -> bool:
    with script(rank, path, **{**CP4, "cp_plan_set": keys, "cp_plan_planner": planner}) as (args, _, _):
        plan_sharing.usable_cores = lambda: cores
        suite = pretrain.suite_of(args)
        shared = pretrain.sharing_of(args, suite)
        assert pretrain.sharing_of(args, suite) is shared, "opened once"
        return shared is not None


@pytest.mark.parametrize(
    ("planner", "keys", "cores", "expected"),
    [
        ("auto", ["algorithm=hierarchical"], 7, True),
        ("auto", ["algorithm=hierarchical"], 8, False),
        ("auto", ["algorithm=hierarchical", "verify_plans=true"], 7, False),
        ("auto", ["algorithm=ring"], 7, False),
        ("node", ["algorithm=ring"], 8, True),
        ("replicated", ["algorithm=hierarchical"], 7, False),
    ],
)
def test_when_ranks_share_plans(
    ranks: MegatronRanks, plan_file: str, planner: str, keys: list[str], cores: int, expected: bool
) -> None:
    assert ranks.run(4, is_shared, plan_file, planner, keys, cores) == [expected] * 4


def test_a_planner_that_this_rank_cannot_have_is_refused(
    run: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cp_plan_planner is 'machine'; valid: auto, replicated, node"):
        pretrain.suite_of(run(cp_plan_planner="machine"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="is 'node', but LOCAL_RANK of launchers such as torchrun is not in the env"):
        pretrain.suite_of(run(cp_plan_planner="node"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert pretrain.suite_of(run(cp_plan_planner="node")).algorithm == "ring"


def test_the_parser_takes_a_planner(capsys: pytest.CaptureFixture[str]) -> None:
    parser = pretrain.add_arguments(ArgumentParser())
    assert parser.parse_args([]).cp_plan_planner == "auto"
    assert parser.parse_args(["--cp-plan-planner", "node"]).cp_plan_planner == "node"
    with pytest.raises(SystemExit):
        parser.parse_args(["--cp-plan-planner", "machine"])
    assert "invalid choice: 'machine'" in capsys.readouterr().err
