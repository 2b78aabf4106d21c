"""Settings that data.balance: pool does not go with, the topology of the pool, and the bound of tokens of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import Topology
from mindspeed_cp.config.derived import training_plan_options
from mindspeed_cp.config.pool import Subpools, pool_topology, replicas_of_pool, subpools_of
from mindspeed_cp.config.rules import data_parallel_size
from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs" / "pool.yaml"


def pool(*overrides: str) -> Settings:
    return load_settings(CONFIG, ["context_parallel_suite.cluster=null", *overrides])  # nodes of any size


def of_pool(settings: Settings, replicas: int, local_ranks: int) -> Topology:
    tensor = settings.train.tensor_model_parallel_size
    return pool_topology(settings.context_parallel_suite, replicas, local_ranks, tensor)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "context_parallel_suite.algorithm=ring",
            "context_parallel_suite.algorithm: hierarchical, or data.balance: time",
        ),
        ("context_parallel_suite.algorithm=auto", "algorithm = auto has not"),
        (
            "context_parallel_suite.p2p_groups=directional",
            "p2p_groups = directional .* use auto there, or data.balance: time",
        ),
        ("model.num_moe_experts=4", "model.moe_aux_loss_coeff: 0"),
    ],
)
def test_what_does_not_go_with_the_pool_is_refused_when_it_is_read(override: str, says: str) -> None:
    more = ["model.moe_aux_loss_coeff=0.01"] if "experts" in override else []
    with pytest.raises(ConfigError, match=says) as caught:
        pool(override, *more)
    assert 'data.balance = "pool"' in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "replicas", "local_ranks", "topology"),
    [
        ((), 2, 4, Topology(1, 4)),
        ((), 2, 2, Topology(2, 2)),
        ((), 4, 4, Topology(2, 4)),
        ((), 1, 8, Topology(1, 2)),
        (("context_parallel_suite.nodes=2",), 4, 8, Topology(8, 1)),
        (("train.tensor_model_parallel_size=2",), 4, 8, Topology(2, 4)),
    ],
)
def test_the_pool_has_the_nodes_of_its_machines(
    overrides: tuple[str, ...], replicas: int, local_ranks: int, topology: Topology
) -> None:
    assert of_pool(pool(*overrides), replicas, local_ranks) == topology


@pytest.mark.parametrize(
    ("replicas", "local_ranks", "overrides", "says"),
    [
        (3, 4, (), "hold 4 of the 6 ranks of 3 replicas"),
        (4, 5, (), "hold 5 of the 8 ranks"),
        (
            8,
            16,
            ("context_parallel_suite.cluster=a800",),
            "makes nodes of 16 ranks, which context_parallel_suite.cluster cannot be",
        ),
    ],
)
def test_machines_that_hold_no_equal_numbers_of_replicas_are_refused(
    replicas: int, local_ranks: int, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        of_pool(pool(*overrides), replicas, local_ranks)


def subpools(limit: int, replicas: int, local_ranks: int, *overrides: str) -> Subpools | None:
    suite = pool("train.data_parallel_size=null", *overrides).context_parallel_suite
    return subpools_of(suite, replicas, pool_topology(suite, replicas, local_ranks, 1), limit)


def test_a_pool_of_more_ranks_than_the_limit_is_divided_into_the_fewest_equal_pools() -> None:
    """Of 2 ranks a replica, 4 or 8 on each machine."""
    assert subpools(1024, 512, 8) is None, "1,024 ranks are one pool"
    assert subpools(1024, 2048, 8) == Subpools(4, Topology(128, 8))
    assert subpools(1024, 528, 8) == Subpools(2, Topology(66, 8)), "1,056 ranks"
    assert subpools(1024, 513, 6) == Subpools(3, Topology(57, 6)), "1,026 ranks"
    assert subpools(4, 4, 8) == Subpools(2, Topology(1, 4)), "two pools on a machine"
    assert subpools(7, 8, 4) == Subpools(4, Topology(1, 4)), "a pool has no part of a machine"
    assert subpools(8, 4, 4, "context_parallel_suite.nodes=2") is None
    assert subpools(4, 4, 4, "context_parallel_suite.nodes=2") == Subpools(2, Topology(4, 1)), "2 nodes of one rank"
    assert replicas_of_pool(2048, 1, 1024) == 1, "without replicas there is no pool"


@pytest.mark.parametrize(
    ("limit", "replicas", "local_ranks", "says"),
    [
        (2, 4, 8, "must be 4 or more with 4 replicas of context_parallel_size 2, .* or use another number of replicas"),
        (1024, 521, 1042, "must be 1042 or more with 521 replicas of context_parallel_size 2, "),
        (20, 55, 22, "must be 22 or more with .* whole nodes of 22 ranks or equally many on a node; or use"),
    ],
)
def test_ranks_that_do_not_divide_into_pools_are_refused(
    limit: int, replicas: int, local_ranks: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        subpools(limit, replicas, local_ranks)
    assert str(caught.value).startswith(f"data.pool_ranks = {limit}: ") and "\n" not in str(caught.value)
    least = int(str(caught.value).split("must be ")[1].split()[0])
    assert (pools := subpools(least, replicas, local_ranks)) is None or pools.topology.ranks == least


def test_pools_that_do_not_fit_are_refused_when_the_settings_are_read() -> None:
    with pytest.raises(ConfigError, match=r"data\.pool_ranks = 2: must be 4 or more with"):
        pool("data.pool_ranks=2")
    with pytest.raises(ConfigError, match=r"data\.pool_ranks = 64: has an effect only with balance: pool; remove it"):
        pool("data.pool_ranks=64", "data.balance=time")
    assert pool("data.pool_ranks=64").data.pool_ranks == 64


def test_a_given_number_of_replicas_must_be_that_of_the_ranks() -> None:
    assert data_parallel_size(pool(), 4) == 2
    with pytest.raises(
        ConfigError, match=r"train\.data_parallel_size = 2: needs 4 ranks .* there are 8; use 4, or null"
    ):
        data_parallel_size(pool(), 8)


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ((), 3072),
        (("data.seq_length=1001",), 751),
        (("context_parallel_suite.max_seqlen_per_dp_cp_rank=2500",), 2500),
        (("data.balance=none", "context_parallel_suite.algorithm=ring"), None),
        (("data.balance=none", "context_parallel_suite.context_parallel_size=1"), None),
    ],
)
def test_a_rank_holds_at_most_one_and_a_half_shares_by_default(overrides: tuple[str, ...], bound: int | None) -> None:
    options: dict[str, Any] = training_plan_options(pool(*overrides))
    assert options.get("max_seqlen_per_dp_cp_rank") == bound
