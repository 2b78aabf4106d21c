"""Messages that advance together on a link, instead of one after the other.

A link that serves its messages in turns is busy for as long as one on which they share, but the first of two equal
messages ends after half of the time. On a NIC the other half belongs to another rank, which would go on too late, and
the first one too early. Here messages of a busy period share the link evenly from when they are ready: processor
sharing. The busy period as a whole remains as it is.
"""

from __future__ import annotations

import numpy as np

TOLERANCE = 1e-12  # of a busy period: times that are the same


def share_busy_periods(
    link: np.ndarray, ready: np.ndarray, begun: np.ndarray, ended: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return when messages begin to pass and when they have passed if they share their link, fp64 [messages] each.

    Args:
        link: int64 [messages].
        ready: seconds from which each message may pass, fp64 [messages].
        begun, ended: when they would pass one after the other; fp64 [messages].
    """
    order = np.lexsort((begun, link))
    follows = (link[order[1:]] == link[order[:-1]]) & (begun[order[1:]] == ended[order[:-1]])
    if not follows.any():
        return begun, ended
    first = np.flatnonzero(np.append(True, ~follows))
    count = np.diff(np.append(first, len(order)))
    several = count > 1
    first, count = first[several], count[several]
    column = np.arange(int(count.max()))
    used = column < count[:, None]
    messages = order[np.minimum(first[:, None] + column, len(order) - 1)]
    start = begun[messages[:, :1]]
    arrival = np.where(used, np.maximum(ready[messages] - start, 0), np.inf)
    work = np.where(used, (ended - begun)[messages], 0)
    through = _even_shares(arrival, work)
    begun, ended = begun.copy(), ended.copy()
    begun[messages[used]], ended[messages[used]] = (start + arrival)[used], (start + through)[used]
    return begun, ended


def _even_shares(arrival: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return when each message of some links is through, if a link's messages share it evenly, fp64 [links, messages].

    Args:
        arrival: seconds from which a message may pass, inf for none; the first of each link is 0.
        work: seconds that each message takes alone.
    """
    tolerance = TOLERANCE * work.sum(1, keepdims=True)
    left, through, now = work.copy(), arrival.copy(), np.zeros((len(work), 1))
    while True:
        here = arrival <= now
        passing = here & (left > 0)
        count = passing.sum(1, keepdims=True)
        next_arrival = np.where(here, np.inf, arrival).min(1, keepdims=True)
        span = np.where(passing, left, np.inf).min(1, keepdims=True) * np.maximum(count, 1)
        until = np.minimum(now + span, next_arrival)
        if np.isinf(until).all():
            return through
        until = np.where(np.isinf(until), now, until)
        left -= np.where(passing, (until - now) / np.maximum(count, 1), 0)
        ends = passing & (left <= tolerance)
        left[ends] = 0
        through = np.where(ends, until, through)
        now = until
