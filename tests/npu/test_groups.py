"""Every HCCL group of a training run has its time-out, to the second, and its options: Megatron's, the default one, directional ones."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.comm.directional_groups import open_directional_groups, warm_up
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology
from tests.limits import HANG
from tests.npu import ranks
from tests.ports import free_port

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "ascend.md"
TIME_OUTS = ("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT")
BATCHED = {"p2p_groups": "batched", "hccl_buffer_mb": 9}
DIRECTIONAL = {"p2p_groups": "directional", "hccl_buffer_mb": 9}


Groups = list[tuple[str, timedelta, dict[str, int]]]


def ring(size: int) -> Plan:
    return build_plan(Documents([64]), Topology(1, size), AttentionConfig(2), "ring")


def join_as(rank: int, size: int, port: str, suite: dict[str, Any]) -> tuple[Groups, dict[str, str | None]]:
    """Library, time-out and options of all groups of a run, and HCCL's time-outs; the groups are used and warmed up, so
    that HCCL makes communicators."""
    from mindspeed_cp.config.settings import Settings
    from mindspeed_cp.megatron import megatron_compat
    from mindspeed_cp.train.world import join_ranks

    dist.destroy_process_group()  # of tests/npu/ranks.py
    os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sizes = {"context_parallel_size": size, "timeout_seconds": 77.5}
    settings = Settings(train={"device": "npu"}, context_parallel_suite={**sizes, **suite})
    os.environ.pop("HCCL_EXEC_TIMEOUT", None)  # of tests/npu/ranks.py
    groups = []
    with megatron_compat(), join_ranks(settings) as world:
        for group in dist.distributed_c10d._world.pg_map:
            backends = [group._get_backend(device) for device in group._device_types]
            groups += [(b.name(), b.options._timeout, getattr(b.options, "hccl_config", {})) for b in backends]
        dist.all_reduce(torch.ones(1, device="npu"))
        warm_up(ring(size), world.plan_group(0), "npu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what ranks.py destroys
    return groups, {name: os.environ.get(name) for name in TIME_OUTS}


def joined(suite: dict[str, Any], wanted: dict[str, int], **environment: str) -> list[dict[str, Any]]:
    """Communicators of a run over two ranks whose groups all have these options."""
    done = ranks.run(2, join_as, free_port(), suite, environment=environment)
    for groups, time_outs in done.values():
        libraries = [library for library, _, _ in groups]
        assert libraries.count("hccl") > 5 and libraries.count("gloo") > 2
        assert {timeout for _, timeout, _ in groups} == {timedelta(seconds=77.5)}
        of_hccl = [options for library, _, options in groups if library == "hccl"]
        assert all(options in (wanted, {}) for options in of_hccl)
        assert sum(options == {} for options in of_hccl) == (
            2 if suite["p2p_groups"] == "directional" else 0
        )  # directional groups
        assert time_outs == {"HCCL_EXEC_TIMEOUT": "69", "HCCL_CONNECT_TIMEOUT": "120"}
    return done.created()


def test_all_groups_have_the_options_and_the_time_out_of_the_settings() -> None:
    made = joined(BATCHED, {"hccl_buffer_size": 9})
    assert len(made) == 4
    for line in made:
        assert line["buffer_mb"] == 9


def test_communicators_of_pairs_have_the_buffer_of_the_settings_unless_the_environment_says_another() -> None:
    made = joined(DIRECTIONAL, {"hccl_buffer_size": 9})
    assert [line["buffer_mb"] for line in made] == [9] * 8  # two groups and two directional groups, on two ranks
    made = joined(DIRECTIONAL, {"hccl_buffer_size": 9}, P2P_HCCL_BUFFSIZE="7")
    assert sorted(line["buffer_mb"] for line in made) == [7] * 4 + [9] * 4


def directional_groups_of_pairs(rank: int, size: int) -> None:
    open_directional_groups(None, "npu")
    warm_up(ring(size), None, "npu")


@pytest.mark.parametrize("value", ["0", "", "none"])
def test_directional_groups_without_communicators_of_pairs_are_refused(value: str) -> None:
    """Three ranks would wait for each other for ever."""
    for error in ranks.start(3, directional_groups_of_pairs, environment={"P2P_HCCL_BUFFSIZE": value}).errors:
        assert error is not None and f"ConfigError: P2P_HCCL_BUFFSIZE = '{value}' in the environment" in error
        assert "valid: 1 or more (MB; default: 20), or context_parallel_suite.p2p_groups: batched" in error


def own_program(rank: int, size: int, port: str) -> str:
    """The code of docs/ascend.md, as a program of its own."""
    from megatron.core.transformer import TransformerConfig

    from mindspeed_cp.config import SuiteSettings
    from mindspeed_cp.megatron import megatron_compat

    dist.destroy_process_group()  # of tests/npu/ranks.py
    os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    suite = SuiteSettings(context_parallel_size=size, timeout_seconds=HANG)
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, context_parallel_size=size)
    with megatron_compat():
        exec(compile(block, str(PAGE), "exec"), {"suite": suite, "config": config, "sequence_length": 100})
    return os.environ["HCCL_EXEC_TIMEOUT"]


def test_the_program_of_the_documentation_runs() -> None:
    done = ranks.run(3, own_program, free_port())
    assert [line["buffer_mb"] for line in done.created()].count(20) == 6  # both ends of the three edges of a ring
