"""data.balance: the same curve with documents laid anew over replicas; plans ahead of the steps; ranks that disagree."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import Documents
from mindspeed_cp.errors import ConfigError
from tests.limits import HANG
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_splits import MODELS
from tests.train.test_training import assert_same_curve, curve, tiny, train_here, values

CP2: dict[str, Any] = dict(context_parallel_suite__context_parallel_size=2)
COMMON: dict[str, Any] = dict(train__train_iters=5, train__lr_decay_iters=20, train__global_batch_size=4)
TIME: dict[str, Any] = dict(data__balance="time")


def by_square(settings: str) -> dict[str, Any]:
    """In a rank: train where a document costs the square of its length, and a micro-batch nothing besides, so that
    replicas get other numbers of micro-batches.  Also those numbers, of this rank, for each step."""
    from mindspeed_cp.train import loop, step

    make, schedule, counts = loop.make_dispatcher, step.get_forward_backward_func, []

    def counted() -> Any:
        run = schedule()

        def wrapped(**arguments: Any) -> Any:
            counts.append(arguments["num_microbatches"])
            return run(**arguments)

        return wrapped

    loop.make_dispatcher = lambda *given: replace(make(*given), cost=_square, per_micro_batch=0.0)
    step.get_forward_backward_func = counted
    return {**train_here(settings), "counts": counts}


def _square(lengths: np.ndarray) -> np.ndarray:
    return lengths * lengths.astype(np.float64)


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the metrics that do not depend on how documents are cut."""
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "tokens", "documents", "lr")} for line in lines]


@pytest.fixture(scope="module")
def reference(fresh_ranks: FreshRanks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """5 steps of 4 rows on one rank, as they come."""
    return curve(fresh_ranks, tiny(corpus, tmp_path_factory.mktemp("one"), **COMMON), 1)


def test_replicas_with_other_numbers_of_micro_batches_give_the_same_losses(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    off = fresh_ranks.run(4, by_square, tiny(corpus, tmp_path / "off", **COMMON, **CP2).model_dump_json())[0]["lines"]
    settings = tiny(corpus, tmp_path / "on", **COMMON, **CP2, **TIME)
    ranks = fresh_ranks.run(4, by_square, settings.model_dump_json())
    lines, counts = ranks[0]["lines"], [rank["counts"] for rank in ranks]
    assert_same_curve(lines, off)
    assert_same_curve(lines, reference)
    assert counts[0] == counts[1] and counts[2] == counts[3], "ranks of a replica"
    assert any(counted != other for counted, other in zip(counts[0], counts[2], strict=True)), (
        "this is what must be exact"
    )
    on, before = (np.array(values(curve_lines, "replica_imbalance")) for curve_lines in (lines, off))
    assert (on >= 1).all() and (on <= before).all() and on.mean() < 1.05 < before.mean()


@pytest.mark.thorough  # tests/data keeps the numbers of documents
def test_dropped_weights_do_not_depend_on_replicas(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """With windows, biases and dropout; documents keep the numbers that they have in the global batch."""
    changes = {**COMMON, **MODELS["biased"], **TIME, "train__train_iters": 3}
    alone = fresh_ranks.run(1, by_square, tiny(corpus, tmp_path / "one", **changes).model_dump_json())[0]["lines"]
    settings = tiny(corpus, tmp_path / "replicas", **changes, **CP2)
    assert_same_curve(fresh_ranks.run(4, by_square, settings.model_dump_json())[0]["lines"], alone)


@pytest.mark.thorough  # tests/data/test_balance.py shows that the counts are equal
@pytest.mark.parametrize("experts", [2, 4])
def test_replicas_that_share_experts_have_equally_many_micro_batches(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, experts: int
) -> None:
    """With 4 expert-parallel ranks a group spans both replicas, which then wait for each other in every layer."""
    model = {**MODELS["experts"], "model__moe_aux_loss_coeff": 0.0}
    changes = {**COMMON, **CP2, **model, "train__expert_model_parallel_size": experts, "train__train_iters": 3}
    off = curve(fresh_ranks, tiny(corpus, tmp_path / "off", **changes), 4)
    ranks = fresh_ranks.run(4, by_square, tiny(corpus, tmp_path / "on", **changes, **TIME).model_dump_json())
    assert_same_curve(ranks[0]["lines"], off)
    different = [counted != other for counted, other in zip(ranks[0]["counts"], ranks[2]["counts"], strict=True)]
    assert any(different) == (experts == 2)


def test_a_loss_of_whole_rows_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.balance = \"time\": repacks rows .* model\.moe_aux_loss_coeff: 0$"):
        tiny(corpus, tmp_path, **MODELS["experts"], **TIME)


# planning ahead


def plans_ahead(settings: str) -> int:
    """In a rank: train while no micro-batch is finished before the plan of the next one is made; return the steps.

    The training ends only if planning runs beside computing: the next plan is made while this micro-batch computes.
    """
    from mindspeed_cp.algorithms import plan_cache as plans
    from mindspeed_cp.train import step

    get, forward = plans.PlanCache.get, step._forward
    planned, computed = threading.Semaphore(0), 0

    def counted_get(*arguments: Any) -> Any:
        plan = get(*arguments)
        planned.release()
        return plan

    def delayed_forward(*arguments: Any) -> Any:
        nonlocal computed
        if not computed:
            assert planned.acquire(timeout=HANG), "the plan of the first micro-batch"
        computed += 1
        assert planned.acquire(timeout=HANG), "the plan of the next micro-batch, which is made meanwhile"
        return forward(*arguments)

    plans.PlanCache.get, step._forward = counted_get, delayed_forward  # type: ignore[method-assign]
    return len(train_here(settings)["lines"])


def test_the_next_micro_batch_is_planned_while_this_one_computes(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = tiny(corpus, tmp_path / "a", **COMMON)
    [steps] = fresh_ranks.run(1, plans_ahead, settings.model_dump_json())
    assert steps == settings.train.train_iters


def test_cached_plans_give_the_same_bits(fresh_ranks: FreshRanks, tmp_path: Path) -> None:
    """Documents longer than the context: most rows are one piece of it."""
    path = tmp_path / "long.jsonl"
    text = "".join(chr(97 + i % 26) for i in range(2000))
    path.write_text("".join(json.dumps({"text": text[: 150 + 31 * i]}) + "\n" for i in range(18)))
    settings = tiny(path, tmp_path / "a", **COMMON, **CP2, data__seq_length=128)
    [kept, _] = fresh_ranks.run(2, train_here, settings.model_dump_json())
    anew = fresh_ranks.run(
        2, forgetful, settings.model_copy(update={"output": _folder(settings, "b")}).model_dump_json()
    )[0]
    assert compared(kept["lines"]) == compared(anew["lines"]), "not a bit differs"


def forgetful(settings: str) -> dict[str, Any]:
    """In a rank: train, and keep no plan."""
    from mindspeed_cp.algorithms import plan_cache as plans
    from mindspeed_cp.train import micro_batch_loader as batches

    class Forgetful(plans.PlanCache):
        def get(self, *arguments: Any) -> Any:
            self._plans.clear()
            return super().get(*arguments)

    batches.PlanCache = Forgetful  # type: ignore[misc]
    return train_here(settings)


def _folder(settings: Any, name: str) -> Any:
    return settings.output.model_copy(update={"folder": str(Path(settings.output.folder).parent / name)})


# ranks that disagree


def deals_otherwise(settings: str, odd: int) -> str:
    """In a rank: one rank leaves documents where they are; return the error of every rank."""
    import torch.distributed as dist

    from mindspeed_cp.train import loop

    make = loop.make_dispatcher

    def other(*given: Any) -> Any:
        dispatcher = replace(make(*given), cost=_square, per_micro_batch=0.0)
        return replace(dispatcher, balance="none") if dist.get_rank() == odd else dispatcher

    loop.make_dispatcher = other
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_replica_that_assigns_documents_differently_is_named(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    settings = tiny(corpus, tmp_path, **COMMON, **TIME)
    for text in fresh_ranks.run(3 + 1, deals_otherwise, settings.model_dump_json(), 2):
        assert text.startswith("step 1: rank 2 and the others of 4 assigned documents to replicas differently")
    assert not list((tmp_path / "checkpoints").glob("iter*"))


def plans_otherwise(settings: str) -> str:
    """In a rank: rank 3 plans documents of other lengths, of as many tokens."""
    import torch.distributed as dist

    from mindspeed_cp.algorithms import plan_cache

    build = plan_cache.build_plan

    def other(documents: Documents, *given: Any, **options: Any) -> Any:
        if dist.get_rank() == 3:
            documents = Documents(documents.lengths[::-1].copy())
        return build(documents, *given, **options)

    plan_cache.build_plan = other
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_ranks_with_other_plans_are_told_and_none_hangs(fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path) -> None:
    """Of the two replicas the one that is right finds out when the other one is gone, or is not asked at all."""
    settings = tiny(
        corpus, tmp_path, **COMMON, context_parallel_suite__context_parallel_size=4,
        context_parallel_suite__verify_plans=True,
    )  # fmt: skip
    for text in fresh_ranks.run(4, plans_otherwise, settings.model_dump_json()):
        assert "the ranks of the group do not have the same plan: documents: rank 3 has" in text
