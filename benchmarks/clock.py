"""Milliseconds of what a device does: by its own events on a GPU or NPU, by the wall on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

#: Cycles that a GPU waits before what is timed, some ten milliseconds: the host is ahead by then, and its time for
#: launching is not counted.
AHEAD = 20_000_000


def once_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call: of a device's work alone, on a CPU of everything."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e3
    module = torch.get_device_module(device)
    begun, ended = (module.Event(enable_timing=True) for _ in range(2))
    if device.type == "cuda":
        torch.cuda._sleep(AHEAD)
    begun.record()
    run()
    ended.record()
    module.synchronize()
    return float(begun.elapsed_time(ended))


def in_turn(runs: Mapping[str, Callable[[], object]], device: torch.device, repeat: int) -> dict[str, float]:
    """Median milliseconds of each, every one in each round, so that a device that slows down slows all of them; two
    rounds before warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 2):
        for name, run in runs.items():
            milliseconds = once_ms(run, device)
            if turn > 1:
                times[name].append(milliseconds)
    return {name: statistics.median(found) for name, found in times.items()}


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes that a call held beside what was there before; None on a CPU, which does not count them."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    module.synchronize()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    run()
    module.synchronize()
    return int(module.max_memory_allocated() - before)


def machine(device: torch.device) -> str:
    """The device and versions, for the head of a table."""
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return f"{name}, torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if device.type == "cuda" else "")
