"""The limit of open files (`ulimit -n`), which gloo's connections reach first.

gloo ends a process that has too many open files with abort(), so that no error can be caught: the limit is compared
before the ranks join.
"""

from __future__ import annotations

import resource

from mindspeed_cp.errors import ConfigError

FILES_OF_A_RANK = 128  # libraries, corpus, checkpoint, logs
FILES_OF_A_PEER = 12  # 10 measured on the first rank: sockets of each process group


def check_open_files(ranks: int) -> int:
    """Return how many files a rank may have to open at once.

    Args:
        ranks: number of all ranks.

    Raises:
        ConfigError: the hard limit of this process is lower.
    """
    needed = FILES_OF_A_RANK + FILES_OF_A_PEER * ranks
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"ulimit -n = {hard}: {ranks} ranks need up to {needed:,} open files each; raise the limit (ulimit -Hn "
            f"{needed}, or nofile in /etc/security/limits.conf), or use fewer ranks"
        )
    return needed


def allow_open_files(ranks: int) -> None:
    """Raise the soft limit of this process to what its rank needs; see `check_open_files`."""
    needed = check_open_files(ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
