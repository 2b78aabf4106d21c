"""Megatron's process groups with this run's time-out, to the second, and its options of HCCL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mindspeed_cp.comm.lanes import group_options
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.swap import replaced

with megatron_imports():
    from megatron.core import parallel_state


@contextmanager
def groups_with(timeout: timedelta, library: str, options: Mapping[str, int]) -> Iterator[None]:
    """Within the block Megatron's groups are made with this time-out and these options.

    Megatron itself counts whole minutes, and its only options of a group are NCCL's (nccl_communicator_config_path).

    Args:
        timeout: of every group.
        library: of the devices' tensors: "gloo", "hccl", "nccl".
        options: for HCCL, as group_options takes them.
    """
    create = parallel_state.create_group

    def made(*arguments: Any, **named: Any) -> Any:
        named["timeout"] = timeout
        if options and named.get("backend") != "gloo":
            named["pg_options"] = group_options(library, options)  # new ones: torch writes each group's name into them
        return create(*arguments, **named)

    with replaced(parallel_state, "create_group", made):
        yield
