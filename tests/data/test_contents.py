"""Digests of contents: what they cover, and where they say that documents differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mindspeed_cp.data.dispatch import Dispatcher
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.errors import ConfigError
from tests.data.corpora import ListCorpus


class Changed(ListCorpus):
    """As ListCorpus, but for one token."""

    def __init__(self, lengths: list[int], document: int | None = None, position: int = 0) -> None:
        super().__init__(lengths)
        self.document, self.position = document, position

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        tokens = super().tokens(document, start, stop)
        if document == self.document and start <= self.position < start + len(tokens):
            tokens[self.position - start] += 1
        return tokens


LENGTHS = [40_000, *range(1, 60), 0, 17]


@pytest.mark.parametrize(("document", "position"), [(0, 0), (0, 39_999), (0, 20_000), (30, 29), (61, 16)])
def test_a_corpus_is_digested_to_its_last_token(document: int, position: int) -> None:
    digest = corpus_digest(Changed(LENGTHS))
    assert digest == corpus_digest(ListCorpus(LENGTHS)) != corpus_digest(Changed(LENGTHS, document, position))
    assert digest != corpus_digest(ListCorpus([*LENGTHS[:-2], 17, 0]))


def stream(corpus: ListCorpus, **more: Any) -> PackedStream:
    return PackedStream(corpus, 64, 0, digest=corpus_digest(corpus), **more)


def test_a_state_of_other_contents_is_refused() -> None:
    state = stream(ListCorpus(LENGTHS)).state_dict()
    stream(ListCorpus(LENGTHS)).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.corpus: has other documents than the saved run had"):
        stream(Changed(LENGTHS, 30)).load_state_dict(state)


def test_a_batch_has_digests_of_what_a_replica_reads_and_of_what_all_read() -> None:
    dispatcher = Dispatcher("none", 2, 64, lambda lengths: lengths.astype(float))

    def batch(corpus: ListCorpus, replica: int) -> tuple[int, int]:
        made = stream(corpus, replica=replica, replicas=2).next_batch(4, dispatcher)
        return made.content_digest, made.sample_digest

    (own, sample), (other, other_sample) = (batch(ListCorpus(LENGTHS), replica) for replica in (0, 1))
    assert own != other and sample == other_sample
    assert float(own) == own < 2**52, "exact in a float"
    assert batch(ListCorpus(LENGTHS), 0) == (own, sample)
    shifted = ListCorpus(LENGTHS)
    shifted.tokens = lambda *where: ListCorpus.tokens(ListCorpus(LENGTHS), *where) + 1  # type: ignore[method-assign]
    changed = batch(shifted, 0)
    assert changed[0] != own and changed[1] != sample
