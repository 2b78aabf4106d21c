"""The three batches that every algorithm runs, and the memory that they need."""

from __future__ import annotations

import numpy as np

from mindspeed_cp.algorithms import ALGORITHMS, build_plan
from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.simulate.memory import attention_peak_bytes

ONE_LONG = "one long document"
UNEVEN = "a packed row of uneven documents"
SHORT = "many short documents"
BATCHES = (ONE_LONG, UNEVEN, SHORT)

DOCUMENTS_PER_ROW = 12  # of the uneven row, about
SPREAD = 1.2  # of the logarithm of their lengths
SHORT_DOCUMENTS_PER_RANK = 8

#: Share of the free memory that the largest algorithm may take: kernels and libraries need buffers of their own.
USABLE = 0.8


def make_batches(tokens: int, ranks: int, seed: int = 0) -> dict[str, list[int]]:
    """Return the lengths of the documents of each batch, by its name; each batch has exactly `tokens` tokens.

    The uneven row has lognormal lengths. Short documents fit on one rank, and differ by half of their mean at most.
    """
    generator = np.random.default_rng(seed)
    mean = tokens / DOCUMENTS_PER_ROW
    uneven: list[int] = []
    while sum(uneven) < tokens:
        length = int(generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD))
        uneven.append(max(1, min(length, tokens - sum(uneven))))
    short: list[int] = []
    typical = max(2, tokens // (ranks * SHORT_DOCUMENTS_PER_RANK))
    while sum(short) < tokens:
        length = int(generator.integers(typical // 2, typical + typical // 2 + 1))
        short.append(max(1, min(length, tokens - sum(short))))
    return {ONE_LONG: [tokens], UNEVEN: uneven, SHORT: short}


def needed_bytes(
    batches: dict[str, list[int]], topology: Topology, attention: AttentionConfig, element: int
) -> tuple[str, np.ndarray]:
    """Return the algorithm with the largest peak, and the peak bytes of each rank over all batches and algorithms,
    int64 [ranks]. Inputs and gradients are counted; weights, libraries and buffers of kernels are not."""
    peak, largest = np.zeros(topology.ranks, np.int64), ""
    for lengths in batches.values():
        for name in ALGORITHMS:
            try:
                plan = build_plan(Documents(lengths), topology, attention, name)
            except (ConfigError, PlanError):
                continue  # the run says why, as a row of the report
            needed = attention_peak_bytes(plan, element)
            if needed.max() > peak.max():
                largest = name
            peak = np.maximum(peak, needed)
    return largest, peak


def check_memory(needed: np.ndarray, largest: str, free: list[int], hosts: list[str], tokens_per_rank: int) -> None:
    """Compare the bytes that ranks need with what their devices have.

    Args:
        needed: peak bytes of each rank, int64 [ranks].
        largest: algorithm that needs most.
        free: free bytes of the device of each rank.
        hosts: device memory that a rank uses: ranks with the same text share one, as those of a CPU do.
        tokens_per_rank: for the error.

    Raises:
        ConfigError: a memory is too small; names it, what is needed, and the tokens that fit.
    """
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, text in enumerate(hosts) if text == host]
        asked, usable = float(needed[ranks].sum()), USABLE * min(free[rank] for rank in ranks)
        if asked > usable:
            fits = int(tokens_per_rank * usable / asked)
            raise ConfigError(
                f"--tokens-per-rank {tokens_per_rank}: {largest} needs {asked / 2**30:.1f} GiB on rank "
                f"{', '.join(map(str, ranks))}, and {usable / 2**30:.1f} GiB are free ({USABLE:.0%} of the free "
                f"memory); valid: at most about {fits}"
            )
