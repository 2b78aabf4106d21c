"""Reuse of freed memory in the process, for runs on the CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMITS = 2**31 - 1, 2**25  # maximum int of mallopt; maximum threshold by the manual of glibc


def keep_freed_memory() -> bool:
    """Make glibc keep large freed blocks instead of returning them to the kernel.

    Attention on the CPU frees and allocates the same buffers of tens of megabytes in every layer. By default each
    buffer is mapped again with a page fault per page, which costs several percent of a ring step; devices have a
    caching allocator for the same reason. The process then holds its peak memory until it ends. Training on the CPU
    and the benchmarks call this once in every rank; your own program may do the same.

    Returns:
        True if it took effect (Linux with glibc).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    applied = any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in _LIMITS)
    return bool(mallopt(_M_TRIM_THRESHOLD, _LIMITS[0])) and applied
