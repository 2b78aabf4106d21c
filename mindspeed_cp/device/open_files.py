"""The limit of open files (`ulimit -n`), which gloo's connections reach first.

gloo ends a process that has too many open files with abort(), so that no error can be caught: the limit is compared
before the ranks join.
"""

from __future__ import annotations

import resource

from mindspeed_cp.errors import ConfigError

FILES_OF_A_RANK = 128  # libraries, corpus, checkpoint, logs
FILES_OF_A_PEER = 12  # 10 measured on the first rank: sockets of each process group


def raise_limit() -> None:
    """Raise the soft limit of this process (often 1,024, which is enough for 74 ranks) to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hard_limit() -> int | None:
    """Return the number of files that a rank on this machine may open, or None without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def largest_run(files: int) -> int:
    """Return the number of ranks for which so many open files of each are enough."""
    return max(1, (files - FILES_OF_A_RANK) // FILES_OF_A_PEER)


def check_open_files(ranks: int) -> None:
    """Raise ConfigError if this machine does not let a rank open the files that so many ranks need."""
    needed, hard = FILES_OF_A_RANK + FILES_OF_A_PEER * ranks, hard_limit()
    if hard is not None and hard < needed:
        raise ConfigError(
            f"ulimit -n = {hard}: {ranks} ranks need up to {needed:,} open files each; raise the limit (ulimit -Hn "
            f"{needed}, or nofile in /etc/security/limits.conf), or use fewer ranks"
        )
