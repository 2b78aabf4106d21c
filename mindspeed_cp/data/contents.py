"""Digests of what documents contain: equal lengths do not mean equal documents.

A corpus has a few digests, each of consecutive documents, which ranks compare at the start and a resumed run with its
checkpoint. They cover all tokens of a small corpus and blocks at random positions of a large one, so that opening it
stays quick; what a run then reads is digested row by row (:class:`mindspeed_cp.data.stream.ReplicaBatch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from mindspeed_cp.data.corpus import Corpus
from mindspeed_cp.data.dispatch import DIGEST_BITS
from mindspeed_cp.data.trajectory_corpus import TrajectoryCorpus

WHOLE_TOKENS = 2**24  # of a corpus that is digested as a whole
BLOCK_TOKENS, SAMPLED_BLOCKS = 2**14, 1024  # of larger ones
GROUPS = 16  # digests of a corpus


def corpus_digests(corpus: Corpus) -> list[str]:
    """Return the digests of GROUPS runs of documents, each 16 hexadecimal digits; all blocks are read.

    Groups of trajectories were digested as a whole when their corpus was opened.

    Raises:
        ConfigError: the corpus cannot be read.
    """
    lengths = np.asarray(corpus.lengths, np.int64)
    stops = np.cumsum(lengths)
    digests = [blake2b(digest_size=8) for _ in range(GROUPS)]
    if isinstance(corpus, TrajectoryCorpus):
        for number, group_digest in enumerate(corpus.group_digests):
            digests[number * GROUPS // len(lengths)].update(group_digest)
        return [digest.hexdigest() for digest in digests]
    for document, start in _blocks(lengths, stops):
        stop = min(start + BLOCK_TOKENS, int(lengths[document]))
        digest = digests[document * GROUPS // len(lengths)]
        digest.update(np.array([document, start, stop], "<i8").tobytes())
        digest.update(_as_bytes(corpus.tokens(document, start, stop)))
    return [digest.hexdigest() for digest in digests]


def _blocks(lengths: np.ndarray, stops: np.ndarray) -> Iterable[tuple[int, int]]:
    """Yield (document, first token) of the blocks to read, in the order of the corpus."""
    total = int(stops[-1])
    if total <= WHOLE_TOKENS:
        for document, length in enumerate(lengths.tolist()):
            yield from ((document, start) for start in range(0, length, BLOCK_TOKENS))
        return
    positions = np.random.PCG64(0).random_raw(SAMPLED_BLOCKS) % total  # the same numbers in all releases of NumPy
    documents = np.searchsorted(stops, positions.astype(np.int64), "right")
    starts = positions.astype(np.int64) - (stops - lengths)[documents]
    yield from sorted(set(zip(documents.tolist(), (starts - starts % BLOCK_TOKENS).tolist(), strict=True)))


def different_documents(digests: Sequence[str], others: Sequence[str], documents: int) -> str | None:
    """Return where two corpora of equal lengths differ, "documents 120 to 239 of 300", or None if they do not."""
    different = [group for group, pair in enumerate(zip(digests, others, strict=False)) if pair[0] != pair[1]]
    if not different:
        return None if len(digests) == len(others) else f"documents 0 to {documents - 1} of {documents}"
    first, last = -(-different[0] * documents // GROUPS), -(-(different[-1] + 1) * documents // GROUPS) - 1
    return f"{'document' if first == last else 'documents'} {first}{f' to {last}' * (first < last)} of {documents}"


def rows_digest(rows: Iterable[np.ndarray]) -> int:
    """Return a digest of the contents of some rows, an integer of DIGEST_BITS."""
    digest = blake2b(digest_size=8)
    for tokens in rows:
        digest.update(_as_bytes(tokens))
    return int.from_bytes(digest.digest(), "little") >> (64 - DIGEST_BITS)


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens).astype("<u4").tobytes()
