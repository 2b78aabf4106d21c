"""The nodes of a context-parallel group, from the numbers that the launcher gets."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_cp.convert.command_line import Token, read_flags
from mindspeed_cp.convert.conversion import Change
from mindspeed_cp.convert.rules import Given, Outcome

#: Processes of a node, for torchrun and msrun.
PROCESS_FLAGS = ("--nproc_per_node", "--nproc-per-node", "--local_worker_num")


def nodes_change(launcher: Sequence[Token], given: Given) -> Change | None:
    """Return the change that sets `nodes`, if a group of context-parallel ranks spans several nodes, or may do so.

    Ranks are numbered tensor-parallel first, then context-parallel: a group spans TP * CP ranks in a row.

    Args:
        launcher: words before the training script.
        given: the other flags.

    Raises:
        ConfigError: a flag of processes lacks its value.
    """
    _, flags = read_flags(launcher, dict.fromkeys(PROCESS_FLAGS, 1))
    flag = next((flag for flag in reversed(flags) if flag.name in PROCESS_FLAGS and len(flag.values) == 1), None)
    ranks, tensor_ranks = given.number("--context-parallel-size", 1), given.number("--tensor-model-parallel-size", 1)
    if flag is None or not ranks or ranks == 1:
        return None
    text = flag.values[0]
    processes = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not processes or not tensor_ranks:
        what = "the processes of a node" if not processes else "--tensor-model-parallel-size"
        reason = f"{what} cannot be known here; give --set nodes=NUMBER if a context-parallel group spans several nodes"
        return Change(flag.text, Outcome.STAYS, "", reason, flag.line, flag)
    if ranks * tensor_ranks <= processes:
        return None
    span = ranks * tensor_ranks
    nodes = span // processes
    product = f"tensor- and context-parallel ranks are {span} in a row"
    if span % processes or ranks % nodes:
        reason = f"{product}, which are no whole nodes of {processes} processes; give --set nodes=NUMBER if yours are"
        return Change(flag.text, Outcome.STAYS, "", reason, flag.line, flag)
    reason = f"{product}, on nodes of {processes}"
    return Change(flag.text, Outcome.STAYS_AS_SETTING, f"nodes: {nodes}", reason, flag.line, flag)
