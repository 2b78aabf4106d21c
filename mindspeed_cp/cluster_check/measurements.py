"""The measurements by name, and the worker that runs them."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_cp.cluster_check.launch import Launch
from mindspeed_cp.cluster_check.worker import Worker

MEASUREMENTS = {
    "ranks": ("mindspeed_cp.cluster_check.facts", "rank_facts"),
    "links": ("mindspeed_cp.cluster_check.link_timing", "time_pair"),
    "all ranks": ("mindspeed_cp.cluster_check.link_timing", "join_all"),
    "links together": ("mindspeed_cp.cluster_check.link_timing", "time_together"),
    "forwarding": ("mindspeed_cp.cluster_check.link_timing", "time_forwarding"),
    "kernels": ("mindspeed_cp.cluster_check.kernel_timing", "time_kernels"),
    "messages of many sizes": ("mindspeed_cp.cluster_check.link_timing", "time_for_fit"),
    "overlap": ("mindspeed_cp.cluster_check.kernel_timing", "time_overlap"),
    "algorithms": ("mindspeed_cp.cluster_check.algorithm_runs", "run_algorithm"),
}


def make_rank(launch: Launch, device_type: str, link_seconds: float, generation: int) -> object:
    """Make what all measurements of a worker share; called in the worker."""
    from mindspeed_cp.cluster_check.measuring_rank import MeasuringRank

    return MeasuringRank(launch, device_type, link_seconds, generation)


def worker_starter(launch: Launch, device_type: str, link_seconds: float) -> Callable[[int], Worker]:
    """Return a function that starts the worker of a rank, given the number of its generation."""
    return lambda generation: Worker(make_rank, (launch, device_type, link_seconds, generation))
