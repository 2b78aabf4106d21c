"""Every HCCL group of a training run has its time-out, to the second, and its options: Megatron's, the default one, lanes."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.npu import ranks

SUITE = {"timeout_seconds": 77.5, "hccl_buffer_mb": 9, "hccl_traffic_class": 132, "hccl_service_level": 4}


def join_as(rank: int, size: int, port: str) -> list[tuple[str, timedelta, dict[str, int]]]:
    """Library, time-out and options of all groups of a run; the groups are used, so that HCCL makes communicators."""
    from mindspeed_cp.config import Settings
    from mindspeed_cp.megatron import megatron_compat
    from mindspeed_cp.train.world import join

    dist.destroy_process_group()  # of tests/npu/ranks.py
    os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    settings = Settings(train={"device": "npu"}, context_parallel_suite={"context_parallel_size": size, **SUITE})
    found = []
    with megatron_compat(), join(settings) as world:
        for group in dist.distributed_c10d._world.pg_map:
            backends = [group._get_backend(device) for device in group._device_types]
            found += [(b.name(), b.options._timeout, getattr(b.options, "hccl_config", {})) for b in backends]
        for group in (None, world.cp_group):
            dist.all_reduce(torch.ones(1, device="npu"), group=group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what ranks.py destroys
    return found


def test_all_groups_have_the_options_and_the_time_out_of_the_settings() -> None:
    from tests.ports import free_port

    done = ranks.run(2, join_as, free_port())
    for found in done.values():
        libraries = [library for library, _, _ in found]
        assert libraries.count("hccl") > 5 and libraries.count("gloo") > 2
        assert {timeout for _, timeout, _ in found} == {timedelta(seconds=77.5)}
        wanted = {"hccl_buffer_size": 9, "qos_traffic_class": 132, "qos_service_level": 4}
        assert all(options == wanted for library, _, options in found if library == "hccl")
    made = done.created()
    assert len(made) == 4
    for line in made:
        assert (line["buffer_mb"], line["traffic_class"], line["service_level"]) == (9, 132, 4)
