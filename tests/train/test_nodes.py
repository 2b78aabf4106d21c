"""What the settings say of nodes, against the ranks that were started."""

from __future__ import annotations

import pytest

from mindspeed_cp import ConfigError
from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.world import check_nodes


def settings(nodes: int, algorithm: str = "hierarchical", tp: int = 1) -> Settings:
    return Settings(
        context_parallel_suite={"context_parallel_size": 16, "nodes": nodes, "algorithm": algorithm},
        train={"tensor_model_parallel_size": tp},
        model={"num_attention_heads": 4, "hidden_size": 64},
    )


def test_more_ranks_on_a_node_than_were_started_are_refused() -> None:
    check_nodes(settings(2), 8, 16)
    check_nodes(settings(4, tp=2), 8, 32)
    with pytest.raises(
        ConfigError, match=r"nodes = 1: puts 16 ranks on a node, but 8 were started .*; valid: nodes = 2"
    ):
        check_nodes(settings(1), 8, 16)
    with pytest.raises(ConfigError, match=r"nodes = 2: puts 16 ranks on a node, but 8 .*; valid: nodes = 4"):
        check_nodes(settings(2, tp=2), 8, 32)


def test_nodes_may_be_supposed_on_one_machine_and_do_not_matter_to_others() -> None:
    check_nodes(settings(1), 16, 16)
    check_nodes(settings(4), 16, 16)
    check_nodes(settings(1, "ring"), 8, 16)
