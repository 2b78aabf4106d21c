"""Faults that can be put into the oracle on purpose, so that a check of a device can be seen to fail.

Each is a way in which an operator has been wrong, or could be, without saying so.
"""

from __future__ import annotations

COLUMNS = "mask ignored past 512 columns"
ORDER = "statistics in TND order"  # [T, N, 8] although per sequence [N, S_i, 8] was asked for
KV_START = "kv_start_idx ignored"
STATISTICS = "gradient ignores given statistics"  # it recomputes those of its own keys
TOP_LEFT = "sparse_mode 3 from the top left"  # as mode 2
HEADS = "key heads interleaved"  # query head h uses key head h % Nkv, not h // (Nq / Nkv)
KEEP_PROB = "dropout without 1/keep_prob"
BITS = "gradient drops other weights"  # its dropout mask is not the forward's
MODE_1 = "sparse_mode 1 as causal"  # the mask that was given does not count
UPDATE = "ring update without maxima"  # sums are added as if both parts had one maximum
UPDATE_OUT = "ring update keeps the first output"  # statistics are right, the output is not weighed

STARTS_FIRST = "start indices in the first sequence alone"  # which npu_alibi: shared gives to several
SUM_OF_ONE = "gradient ignores statistics whose sum is 1"  # those of npu_statistics: lse; it takes its own
GAPS = "keys of sequences without queries not skipped"  # which npu_key_gaps: skipped leaves there
EQUAL_LENGTHS = "TND of equal lengths and D 128 a key late"  # as if BSH had another stride
BAND_HANGS = "sparse_mode 4 never ends"
OTHER_BITS = "deterministic gradients in any order"  # with other bits at every call

#: Of attention, and of variants of the npu backend (tests/doctor/test_kernel_capability.py).
FAULTS = (COLUMNS, ORDER, KV_START, STATISTICS, TOP_LEFT, HEADS, KEEP_PROB, BITS, MODE_1, UPDATE, UPDATE_OUT)
VARIANT_FAULTS = (STARTS_FIRST, SUM_OF_ONE, GAPS, EQUAL_LENGTHS, BAND_HANGS, OTHER_BITS)

_fault: list[str] = []


def set_fault(name: str | None) -> None:
    """Put a fault into the oracle, or take it out again (None).

    Raises:
        ValueError: no such fault.
    """
    valid = (*FAULTS, *VARIANT_FAULTS)
    if name and name not in valid:
        raise ValueError(f"no fault is called {name!r}; valid: {', '.join(valid)}")
    _fault[:] = [name] if name else []


def on(name: str) -> bool:
    """That fault is in."""
    return name in _fault
