"""train.planner: one rank of a machine plans for the others; the same losses, and errors on all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan
from mindspeed_cp.config.pool import Subpools
from mindspeed_cp.errors import ConfigError, PeerError
from mindspeed_cp.plan_sharing.node_ranks import NodeRanks, node_ranks
from tests.limits import HANG
from tests.train.fresh_ranks import FreshRanks
from tests.train.test_pool import COMMON, CP2, IN_TURN, POOL, choosing
from tests.train.test_training import tiny, train_here, values

# which ranks are on a machine


def test_ranks_of_a_machine_as_their_launcher_numbers_them() -> None:
    table = dict(enumerate([[0, 3, 8, 70]] * 3 + [[3, 3, 6, 71]] * 2))
    assert node_ranks(table, 1, 5) == NodeRanks((0, 1, 2), 8 / 3)
    assert node_ranks(table, 4, 5) == NodeRanks((3, 4), 3.0), "fewer ranks than the launcher has room for"
    replica = {rank: table[rank] for rank in (1, 2, 3)}
    assert node_ranks(replica, 2, 5) == NodeRanks((1, 2), 8 / 3), "another replica has cores of the machine, too"
    cyclic = dict(enumerate([[0, 2, 8, 70], [1, 2, 8, 71], [1, 2, 8, 70], [2, 2, 8, 71]]))  # 0 and 2 are on one machine
    assert [node_ranks(cyclic, rank, 4) for rank in range(4)] == [None] * 4


def world_of(rank: int, size: int, local: int, **more: Any) -> Any:
    """A rank of a training of 2 replicas, without process groups."""
    from mindspeed_cp.train.world import World

    first = rank // local * local
    node = NodeRanks(tuple(range(first, first + local)), more.pop("cores", 1.0))
    values = {"cp_size": 2, "tp_size": 1, "stages": 1, "pool": None, **more}
    per_replica = values["cp_size"] * values["tp_size"]
    replicas = size // values["stages"] // per_replica
    return World(
        rank=rank, size=size, device=torch.device("cpu"), replicas=replicas, replica=rank // per_replica % replicas,
        cp_rank=rank // values["tp_size"] % values["cp_size"], local_size=local, store=None, node=node, **values,
    )  # fmt: skip


def test_who_plans_for_whom() -> None:
    from mindspeed_cp.train.plan_sharing import plan_rank, ranks_that_share

    world = world_of(5, 16, 8, tp_size=2, stages=2)  # a stage is 8 ranks: 2 replicas of 2 x 2
    assert ranks_that_share(world, 5, "replica") == (4, 5, 6, 7) and ranks_that_share(world, 5, "pool") == tuple(
        range(8)
    )
    assert [plan_rank(world, rank, 0) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [plan_rank(world, rank, 1) for rank in (0, 2, 5, 7, 8, 15)] == [0, 1, 2, 3, 0, 3]
    one_machine = world_of(5, 16, 16, tp_size=2, stages=2)
    assert ranks_that_share(one_machine, 12, "pool") == tuple(range(8, 16))
    assert ranks_that_share(one_machine, 12, "node") == tuple(range(16))
    halves = world_of(13, 32, 16, tp_size=2, stages=2, subpools=Subpools(2, Topology(1, 4)))  # 4 replicas of 2 x 2
    assert ranks_that_share(halves, 13, "subpool") == tuple(range(8, 16))
    assert ranks_that_share(halves, 3, "subpool") == tuple(range(8))
    assert [plan_rank(halves, rank, 2) for rank in (0, 4, 7, 8, 14, 16, 31)] == [0, 2, 3, 0, 3, 0, 3]
    assert [halves.plan_rank(pools) for pools in (0, 1, 2)] == [0, 6, 2], "replica 3 of 4, its first rank"
    across = world_of(1, 4, 1, cp_size=4)
    assert ranks_that_share(across, 1, "replica") == (1,), "no other rank of the machine"


def test_when_ranks_share_plans(tmp_path: Path, corpus: Path) -> None:
    from mindspeed_cp.train.plan_sharing import shares_plans

    def shares(world: Any, **changes: Any) -> bool:
        return shares_plans(tiny(corpus, tmp_path, **changes), world)

    searched = {"context_parallel_suite__algorithm": "hierarchical"}
    world, roomy = world_of(0, 4, 4), world_of(0, 4, 4, cores=2.0)
    assert shares(world, **searched) and not shares(world) and not shares(roomy, **searched)
    assert shares(world, context_parallel_suite__candidates=["ulysses"])
    assert not shares(world, **searched, context_parallel_suite__verify_plans=True)
    assert not shares(world, **searched, train__planner="replicated") and shares(roomy, train__planner="node")
    assert not shares(world_of(0, 4, 1), **searched, train__planner="node"), "alone on its machine"
    scattered = replace(world, node=None)
    assert not shares(scattered, **searched)
    with pytest.raises(ConfigError, match=r"train\.planner is 'node', but the launcher does not number"):
        shares(scattered, train__planner="node")


# what travels between ranks, here threads


class Ranks:
    """Ranks of one machine in threads, which share results in this order."""

    def __init__(self, size: int, **more: Any) -> None:
        from mindspeed_cp.train.world import World

        barrier, paths = threading.Barrier(size), [None] * size

        class ThreadWorld(World):
            def gather_json(self, value: Any) -> list[Any]:
                paths[self.rank] = value
                barrier.wait(HANG)
                return list(paths)

        self.worlds = [ThreadWorld(**vars(world_of(rank, size, size, **more))) for rank in range(size)]
        self.ended = [threading.Event() for _ in range(size)]

    def run(self, settings: Any, work: Callable[[int, Any], Any]) -> list[Any]:
        """work(rank, sharing) in the thread of each rank; results, or errors."""
        from mindspeed_cp.train.plan_sharing import PlanSharing

        def rank(number: int) -> Any:
            try:
                sharing = PlanSharing.open(settings, self.worlds[number], self.ended[number].is_set)
                assert sharing is not None
                with sharing:
                    return work(number, sharing)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.worlds)) as threads:
            return list(threads.map(rank, range(len(self.worlds))))


@pytest.fixture
def shared(tmp_path: Path, corpus: Path) -> Any:
    return tiny(corpus, tmp_path, train__planner="node")


def as_text(value: int, ranks: Sequence[int]) -> Iterable[bytes]:
    return [f"{value} for {rank}".encode() for rank in ranks]


def test_one_rank_works_and_the_others_get_their_share(shared: Any) -> None:
    made: list[int] = []

    def work(rank: int, sharing: Any) -> list[Any]:
        def make() -> int:
            made.append(rank)
            return 10 * len(made)

        return [sharing.share("replica", make, as_text, bytes.decode) for _ in range(3)]

    results = Ranks(4).run(shared, work)
    assert sorted(made) == [0, 0, 0, 2, 2, 2], "the first rank of each replica"
    for planner, other in ((0, 1), (2, 3)):
        assert results[other] == [f"{value} for {other}" for value in results[planner]]


def test_a_large_share_waits_until_it_is_read(shared: Any) -> None:
    content = np.random.default_rng(0).bytes(3_000_000)

    def work(rank: int, sharing: Any) -> Any:
        if rank == 1:
            time.sleep(0.2)
        return sharing.share("replica", lambda: content, lambda value, ranks: [value] * len(ranks), bytes)

    assert Ranks(4).run(shared, work) == [content] * 4


def test_an_error_of_the_planner_is_raised_by_all(shared: Any) -> None:
    def work(rank: int, sharing: Any) -> Any:
        def fails() -> int:
            raise ConfigError("max_seqlen_per_dp_cp_rank is 3: no placement")

        with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
            sharing.share("replica", lambda: 1 // 0, as_text, bytes.decode)
        return sharing.share("replica", fails, as_text, bytes.decode)

    for error in Ranks(4).run(shared, work):
        assert type(error) is ConfigError and str(error) == "max_seqlen_per_dp_cp_rank is 3: no placement"


def test_an_error_of_what_is_sent_is_raised_by_all(shared: Any) -> None:
    """Also where some shares were made before it."""

    def fails_later(value: int, ranks: Sequence[int]) -> Iterable[bytes]:
        yield from as_text(value, ranks)
        raise MemoryError("no memory for the slices")

    def work(rank: int, sharing: Any) -> Any:
        return sharing.share("replica", lambda: 1, fails_later, bytes.decode)

    for error in Ranks(4).run(shared, work):
        assert isinstance(error, (MemoryError, RuntimeError)) and "no memory for the slices" in str(error)


def test_a_rank_is_told_that_its_planner_cannot_be_reached(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that listens fails before ranks exchange where they listen; nobody waits for it."""
    from mindspeed_cp.plan_sharing import sharing as shared_work

    def cannot(setting: str) -> Any:
        raise ConfigError(f"{setting} is 'node', and no socket can be opened")

    monkeypatch.setattr(shared_work, "Listener", cannot)
    results = Ranks(4).run(shared, lambda rank, sharing: sharing.share("replica", lambda: 1, as_text, bytes.decode))
    assert [type(result) for result in results[::2]] == [ConfigError] * 2
    assert all(isinstance(result, PeerError) for result in results[1::2])


def test_a_rank_that_is_gone_is_named_and_nobody_waits_for_it(shared: Any) -> None:
    def work(rank: int, sharing: Any) -> Any:
        if rank == 0:
            raise MemoryError
        return sharing.share("replica", lambda: 1, as_text, bytes.decode)

    _, error, *others = Ranks(4).run(shared, work)
    assert isinstance(error, PeerError) and "rank 1 lost rank 0 of the same machine" in str(error)
    assert others == [1, "1 for 3"]


def test_a_thread_that_waits_ends_with_its_loader(shared: Any) -> None:
    from mindspeed_cp.plan_sharing.node_sockets import LoaderEnded

    ranks, done = Ranks(4), threading.Event()

    def work(rank: int, sharing: Any) -> Any:
        if rank == 0:
            done.wait(HANG)
            return None
        if rank == 1:
            threading.Timer(0.1, ranks.ended[rank].set).start()
        try:
            return sharing.share("replica", lambda: 1, as_text, bytes.decode)
        finally:
            if rank == 1:
                done.set()

    assert isinstance(ranks.run(shared, work)[1], LoaderEnded)


def test_slices_come_with_the_digest_of_the_whole_plan(shared: Any) -> None:
    from mindspeed_cp.engine.agreement import plan_digest
    from mindspeed_cp.plan_sharing.sharing import decode_plans

    def work(rank: int, sharing: Any) -> Any:
        plan = build_plan(Documents([500, 0, 37, 4]), Topology(1, 2), AttentionConfig(2, 2, 8), "direct")

        def decode(content: bytes) -> Any:
            number, [received] = decode_plans(content)
            assert number == 7
            return received.read()

        given = sharing.share(
            "replica", lambda: plan, lambda value, ranks: sharing.encode_plans(7, [value], 0, ranks), decode
        )
        assert plan_digest(given) == plan_digest(plan) and (given.work_of(rank % 2) == plan.work_of(rank % 2)).all()
        return len(given.forward.contents)

    counts = Ranks(4).run(shared, work)
    assert counts[1] < counts[0], counts


# a training


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(4, {**CP2, "train__use_distributed_optimizer": True}, id="4 ranks, in turn pool and replicas"),
        pytest.param(4, {"data__pool_ranks": 2}, id="4 ranks, in turn two pools and one"),
        pytest.param(
            4, {"train__tensor_model_parallel_size": 2, "train__sequence_parallel": True, "data__balance": "none"},
            id="tensor-parallel ranks", marks=pytest.mark.thorough,
        ),
        pytest.param(3, {"context_parallel_suite__context_parallel_size": 3, "data__balance": "none"}, id="3 ranks"),
    ],
)  # fmt: skip
def test_the_curve_is_that_of_ranks_that_plan_alone(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """Not a bit differs, though some ranks hold no token of some rows."""
    lines = []
    for planner in ("replicated", "node"):
        more = {**COMMON, **POOL, **changes, "train__planner": planner, "train__train_iters": 4}
        settings = tiny(corpus, tmp_path / planner, **more)
        pools = [2, 1] if "data__pool_ranks" in changes else IN_TURN
        results = fresh_ranks.run(ranks, counts_plans, settings.model_dump_json(), pools)
        lines.append(results[0]["lines"])
        built = [result["built"] for result in results]
        assert all(built) if planner == "replicated" else built.count(0) >= ranks // 2 and built[0], built
    assert values(lines[0], "loss") == values(lines[1], "loss")
    assert values(lines[0], "grad_norm") == values(lines[1], "grad_norm")


def counts_plans(settings: str, pools: list[int]) -> dict[str, Any]:
    """In a rank: train; also the number of plans that it built."""
    from mindspeed_cp.plan_sharing import sharing

    build, built = sharing.build_plan, [0]

    def counted(*given: Any, **options: Any) -> Any:
        built[0] += 1
        return build(*given, **options)

    sharing.build_plan = counted
    return {**choosing(settings, pools), "built": built[0]}


def fails_to_plan(settings: str) -> str:
    """In a rank: the third plan of the planner fails; return the error of every rank."""
    from mindspeed_cp.plan_sharing import sharing

    build, built = sharing.build_plan, [0]

    def fails(*given: Any, **options: Any) -> Any:
        built[0] += 1
        if built[0] == 3:
            raise ConfigError("max_seqlen_per_dp_cp_rank is 1: no placement found")
        return build(*given, **options)

    sharing.build_plan = fails
    with pytest.raises(ConfigError) as caught:
        train_here(settings)
    return str(caught.value)


def test_all_ranks_of_a_training_raise_the_error_of_the_planner(
    fresh_ranks: FreshRanks, corpus: Path, tmp_path: Path
) -> None:
    more = {**COMMON, **CP2, "context_parallel_suite__algorithm": "hierarchical", "train__planner": "node"}
    settings = tiny(corpus, tmp_path, **{**more, "context_parallel_suite__context_parallel_size": 4})
    errors = fresh_ranks.run(4, fails_to_plan, settings.model_dump_json())
    assert errors == ["max_seqlen_per_dp_cp_rank is 1: no placement found"] * 4
