"""Times of calls: by events on a GPU or NPU, by the clock of the host on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

#: Cycles that a GPU sleeps before a timed call, some ten milliseconds, so that launches by the host are not counted.
SLEEP_CYCLES = 20_000_000


def once_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call: of the work of the device, or on a CPU of the whole call."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    module = torch.get_device_module(device)
    start_event, end_event = (module.Event(enable_timing=True) for _ in range(2))
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    start_event.record()
    run()
    end_event.record()
    module.synchronize()
    return float(start_event.elapsed_time(end_event))


def time_in_turn(runs: Mapping[str, Callable[[], object]], device: torch.device, repeat: int) -> dict[str, float]:
    """Return the median milliseconds of each call, all in each round, so that a device that slows down affects all of
    them alike. Two more rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeat + 2):
        for name, run in runs.items():
            milliseconds = once_ms(run, device)
            if round_number > 1:
                times[name].append(milliseconds)
    return {name: statistics.median(samples) for name, samples in times.items()}


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of the bytes that a call allocates; None on a CPU, which does not count them."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    run()
    module.synchronize()
    return int(module.max_memory_allocated() - before)


def machine_name(device: torch.device) -> str:
    """Return the device and versions, for the head of a table."""
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return f"{name}, torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if device.type == "cuda" else "")


def median_us(run: Callable[[], object], calls: int, warm_up: int = 1) -> float:
    """Return the median microseconds of a call on the host, after `warm_up` calls that are not counted."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
