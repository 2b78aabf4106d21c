"""All ranks in one process: arguments, whole tensors, and plans that do not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed_cp import ConfigError, PeerError
from mindspeed_cp.engine import Stepping, attend_in_process
from tests.engine.all_ranks import attend_all_ranks
from tests.engine.cases import Case, all_ranks

CASE = Case((40, 0, 13), 3, algorithm="direct")


def test_whole_tensors_in_and_out():
    result = attend_in_process(CASE.plan(), *CASE.inputs())
    for actual, exact in zip((result.out, result.dq, result.dk, result.dv), CASE.reference(), strict=True):
        assert torch.allclose(actual.double(), exact, atol=1e-5)
    alone = attend_in_process(CASE.plan(), *CASE.inputs()[:3])
    assert torch.equal(alone.out, result.out) and alone.dq is None and not alone.out.requires_grad


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v, plan: (q[:2], k, v, plan), "the plan is for 3 ranks, but q, k and v are lists of 2, 3 and 3"),
        (lambda q, k, v, plan: (q, [k[0][:-1], *k[1:]], v, plan), r"rank 0: k has shape .*; the plan gives this rank"),
        (lambda q, k, v, plan: (q, k, [*v[:2], None], plan), "v is a NoneType; valid: a torch.Tensor"),
        (lambda q, k, v, plan: (q, k, v, None), "plan is None; valid: a Plan"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, says):
    plan, (q, k, v), _ = all_ranks(CASE)
    with pytest.raises(ConfigError, match=says):
        attend_all_ranks(*change(q, k, v, plan))


def test_dropout_needs_a_key():
    plan, leaves, _ = all_ranks(replace(CASE, dropout=0.2))
    with pytest.raises(ConfigError, match="no dropout_key was given"):
        attend_all_ranks(*leaves, plan)
    attend_all_ranks(*leaves, plan, training=False)


def test_every_step_of_a_rank_runs_inside_its_context():
    entered = []

    class Context:
        def __init__(self, rank):
            self.rank = rank

        def __enter__(self):
            entered.append(self.rank)

        def __exit__(self, *error):
            pass

    plan, leaves, _ = all_ranks(CASE)
    attend_all_ranks(*leaves, plan, stepping=Stepping(around=Context))
    rounds = len(entered) // 3
    assert rounds > plan.forward.steps and entered == [0, 1, 2] * rounds


def test_a_profile_names_what_the_engine_does():
    plan, leaves, _ = all_ranks(replace(CASE, algorithm="hybrid"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attend_all_ranks(*leaves, plan)
    names = {event.key for event in profiler.key_averages() if event.key.startswith("context parallel: ")}
    assert names == {f"context parallel: {what}" for what in ("post messages", "attention", "wait for messages")}


def test_a_plan_whose_message_ends_disagree_is_refused():
    """The rows of one fetch are changed for its sender, as if ranks had different plans."""
    from mindspeed_cp.comm.in_memory import InMemoryTransport

    post = InMemoryTransport.post

    def shortened(self, transfers, all_to_all=False):
        cut = [replace(t, tensor=t.tensor[:-1]) if t.sends and self.rank == 1 else t for t in transfers]
        return post(self, cut, all_to_all)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InMemoryTransport, "post", shortened)
        with pytest.raises(PeerError, match=r"the ends of a message differ: rank .*K and V, step 0"):
            attend_in_process(CASE.plan(), *CASE.inputs()[:3])
