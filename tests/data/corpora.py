"""A corpus in memory, and what the tests need to look at rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import HealthCheck, settings

from mindspeed_cp.data.corpus import FileCorpus
from mindspeed_cp.data.stream import PackedRow, PackedStream

#: For property tests: a machine that does something else meanwhile must not fail them.
law = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class ListCorpus(FileCorpus):
    """Documents of given lengths whose tokens are all different: token j of document i is 10**6 * i + j."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(())
        self.lengths = np.array(lengths, np.int64)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = int(self.lengths[document]) if stop is None else stop
        return 10**6 * document + np.arange(start, stop)

    def all_tokens(self) -> Counter[int]:
        return Counter(np.concatenate([self.tokens(i) for i in range(len(self.lengths))]).tolist())


def epoch_of(stream: PackedStream) -> int:
    """Return the number of completed passes over the corpus before the newest row."""
    return int(stream.state_dict()["epoch"])


def first_epoch(stream: PackedStream) -> Iterator[PackedRow]:
    while (row := next(stream)) and epoch_of(stream) == 0:
        yield row


def same(a: PackedRow, b: PackedRow) -> bool:
    return (
        a.index == b.index
        and a.documents == b.documents
        and np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.labels, b.labels)
        and np.array_equal(a.loss_mask, b.loss_mask)
    )
