"""The limit of a process on open files, of which a rank needs some for each other rank."""

from __future__ import annotations

import resource

FILES_PER_RANK = 10  # that a rank opens for each rank of the run, measured over gloo with all kinds of groups
_FILES_OF_A_PROCESS = 100


def raise_limit() -> None:
    """Raise the soft limit of this process (often 1,024, which is enough for 92 ranks) to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hard_limit() -> int | None:
    """Return the number of files that a rank on this machine may open, or None without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def largest_run(files: int) -> int:
    """Return the number of ranks for which so many open files of each are enough."""
    return max(1, (files - _FILES_OF_A_PROCESS) // FILES_PER_RANK)
