"""A measured step as one trace of all ranks, with a layer of its first micro-batch as it is modelled below them."""

from __future__ import annotations

from pathlib import Path

from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.plan import build_plan
from mindspeed_cp.report.beside import Beside
from mindspeed_cp.report.files import check_suffix
from mindspeed_cp.report.recorded import recording
from mindspeed_cp.report.trace import write_trace


def write_beside(result: Beside, path: str | Path) -> Path:
    """Write the last step of a result; both recordings begin at time 0.

    Args:
        result: what is predicted and measured.
        path: JSON file to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = check_suffix("--trace", path, (".json",))
    step = result.pairs[-1].step
    topology = step.settings.context_parallel_suite.topology
    attention, layer = step.layers[0]
    documents, algorithm, options = step.micro_batches(0)[0]
    plan = build_plan(documents, topology, attention, algorithm, **options)
    timeline = simulate(plan, fitted(result.cluster, topology.ranks_per_node), layer)
    modelled = recording(timeline, f"layer 1, modelled on {result.chosen}")
    return write_trace(target, [step.recording(), modelled])
