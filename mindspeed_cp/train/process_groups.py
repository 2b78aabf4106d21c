"""Megatron's process groups with this run's time-out, to the second, and its options of HCCL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mindspeed_cp.comm.groups import process_group_options
from mindspeed_cp.megatron import megatron_imports
from mindspeed_cp.megatron.patches.swap import replaced

with megatron_imports():
    from megatron.core import parallel_state


@contextmanager
def megatron_groups_with(timeout: timedelta, library: str, options: Mapping[str, int]) -> Iterator[None]:
    """Make Megatron's groups within the block with this time-out and these options.

    Megatron itself counts whole minutes, and its only options of a group are NCCL's (nccl_communicator_config_path).

    Args:
        timeout: time-out of every group.
        library: library of the tensors on devices: "gloo", "hccl", "nccl".
        options: options of HCCL, as for process_group_options.
    """
    create = parallel_state.create_group

    def create_with_options(*arguments: Any, **named: Any) -> Any:
        named["timeout"] = timeout
        if options and named.get("backend") != "gloo":
            # New options for each group, as torch writes the name of the group into them.
            named["pg_options"] = process_group_options(library, options)
        return create(*arguments, **named)

    with replaced(parallel_state, "create_group", create_with_options):
        yield
