"""Keeps freed memory in the process, for runs on the CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMITS = 2**31 - 1, 2**25  # the largest int that mallopt takes; what glibc's manual calls the largest threshold


def keep_freed_memory() -> bool:
    """Tell glibc to keep large freed blocks instead of giving them back to the kernel.

    Attention on the CPU frees and allocates the same buffers of tens of megabytes in every layer. By default each of
    them is mapped anew and paid for page by page, which costs a ring step several percent of its time; devices have a
    caching allocator for the same reason. The process then holds its peak memory until it ends. Training on the CPU and
    the benchmarks call this once in every rank; a program of your own may do the same.

    Returns:
        True where it took effect: Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mapped = any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in _LIMITS)
    return bool(mallopt(_M_TRIM_THRESHOLD, _LIMITS[0])) and mapped
