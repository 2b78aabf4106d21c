"""Messages that advance together on a link, instead of one after the other.

A link that serves its messages in turns is busy for as long as one on which they share, but the first of two equal
messages ends after half of the time. On a NIC the other half belongs to another rank, which would go on too late, and
the first one too early. Here messages of a busy period share the link evenly from when they are ready: processor
sharing. The busy period as a whole remains as it is.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-12  # relative, of times in a busy period
ARRIVALS = 16  # of a busy period of a link; where messages arrive at more times, some arrive with those before them


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
    work = np.where(used, (ended - begun)[messages], 0)
    arrival = np.where(used, np.maximum(ready[messages] - start, 0), work.sum(1, keepdims=True))
    through = _even_shares(arrival, work)
    begun, ended = begun.copy(), ended.copy()
    begun[messages[used]], ended[messages[used]] = np.maximum(ready[messages], start)[used], (start + through)[used]
    return begun, ended


def _even_shares(arrival: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return when each message of some links is through, if a link's messages share it evenly, fp64 [links, messages].

    Between two arrivals the message with the least work left is through first, after it has got as much as all others.

    Args:
        arrival: seconds from which a message may pass, ascending, the first of each link 0; for none the sum of `work`.
        work: seconds that each message takes alone; 0 for none.
    """
    messages = work.shape[1]
    first = np.append(0, 1 + np.flatnonzero((arrival[:, 1:] > arrival[:, :-1]).any(0)))  # of those that arrive together
    if len(first) > ARRIVALS:
        first = first[np.linspace(0, len(first), ARRIVALS, endpoint=False).astype(int)]
    now, through, left = np.zeros((len(work), 1)), np.zeros_like(work), np.zeros_like(work)
    for begin, end in zip(first, np.append(first[1:], messages), strict=True):
        left[:, begin:end] = work[:, begin:end]
        until = arrival[:, end : end + 1] if end < messages else np.full_like(now, np.inf)
        order = np.argsort(left[:, :end], 1)
        least_first = np.take_along_axis(left[:, :end], order, 1)
        got = np.cumsum(least_first, 1)
        ends = now + got + least_first * np.arange(end - 1, -1, -1)
        done = ends <= until * (1 + ROUNDING)
        passed = np.where(done & (least_first > 0), ends, 0)
        others = end - done.sum(1, keepdims=True)
        rest = until - now - np.where(done, least_first, 0).sum(1, keepdims=True)
        least_first -= np.where(done, least_first, rest / np.maximum(others, 1))
        through_before = np.take_along_axis(through[:, :end], order, 1)
        np.put_along_axis(through[:, :end], order, np.maximum(passed, through_before), 1)
        np.put_along_axis(left[:, :end], order, least_first, 1)
        now = until
    return np.maximum(through, arrival + work)
