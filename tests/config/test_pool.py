"""Settings that data.balance: pool does not go with, the topology of the pool, and the bound of tokens of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_cp import Topology
from mindspeed_cp.config.derived import training_plan_options
from mindspeed_cp.config.rules import data_parallel_size, pool_topology
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
