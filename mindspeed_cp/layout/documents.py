"""Documents: the lengths of the documents in a packed batch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError

MAX_TOKENS = 2**31 - 1  # cumulative lengths are int32 in every fused attention operator


class Documents:
    """Lengths of the documents of one packed batch.

    Documents are packed back to back. Tokens are numbered 0 .. tokens-1 over the whole batch; positions restart at 0 in
    every document::

        lengths   [ 5000 | 37 |  1200 ]
        offsets   0     5000  5037   6237

    Objects with equal lengths are equal and have equal hashes, so a cache of plans can use them as keys.

    Args:
        lengths: token count of each document; documents of length 0 and empty batches are allowed.

    Raises:
        ConfigError: a length is negative or not an integer, or the batch has more than 2**31 - 1 tokens.
    """

    def __init__(self, lengths: Iterable[int] | np.ndarray) -> None:
        try:
            values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths))
        except (TypeError, ValueError):
            raise ConfigError(f"document lengths must be a flat list of whole numbers, not {lengths!r}") from None
        if values.ndim != 1 or not (values.size == 0 or np.issubdtype(values.dtype, np.integer)):
            raise ConfigError(
                f"document lengths must be a flat list of whole numbers, not {values.dtype} of shape {values.shape}"
            )
        bad = np.flatnonzero((values < 0) | (values > MAX_TOKENS))
        if len(bad):
            raise ConfigError(
                f"document {bad[0]} has length {values[bad[0]]}; valid: 0 to {MAX_TOKENS}; split longer documents"
            )
        values = values.astype(np.int64)
        if values.sum() > MAX_TOKENS:
            raise ConfigError(f"the batch has {values.sum()} tokens; valid: at most {MAX_TOKENS}; split the batch")
        values.setflags(write=False)
        self._lengths = values

    @property
    def lengths(self) -> np.ndarray:
        """Token counts, int64 [documents], read-only."""
        return self._lengths

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each document, followed by the number of tokens; int64 [documents + 1], read-only."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        offsets.setflags(write=False)
        return offsets

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return int(self.offsets[-1])

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the document of each token number; int64, the shape of `tokens`."""
        return np.searchsorted(self.offsets, tokens, "right") - 1

    def __len__(self) -> int:
        return len(self._lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and np.array_equal(self._lengths, other._lengths)

    def __hash__(self) -> int:
        return hash(self._lengths.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._lengths[:6]))
        more = f", ... {len(self)} in all" if len(self) > 6 else ""
        return f"Documents([{shown}{more}], tokens={self.tokens})"
