"""Roll: rows that move by k tokens inside their documents, whichever ranks hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError, PlanError
from mindspeed_cp.layout.documents import Documents
from mindspeed_cp.layout.layout import Layout
from mindspeed_cp.layout.redistribution import Redistribution
from mindspeed_cp.layout.runs import ragged_arange


@dataclass(frozen=True, eq=False)
class Roll:
    """Every row gets the row that stands `shift` tokens later in its document.

    Multi-token prediction reads tokens, labels and loss masks in this way. The last `shift` rows of a document get a
    fill value, never a row of the next document. Documents of 5 and 2 tokens, shift 1::

        row    a0 a1 a2 a3 a4 b0 b1
        gets   a1 a2 a3 a4 -  b1 -

    A document without its last `shift` tokens is a shorter document. The roll is the redistribution of these shorter
    documents from the ranks that hold token p + shift to the ranks that hold token p; most rows stay on their rank. Its
    adjoint is the roll by -shift.

    Attributes:
        layout: rows of every rank, with all heads.
        shift: number of tokens; negative: rows get those that stand earlier, and the first ones are filled.

    Raises:
        PlanError: the layout splits heads.
        ConfigError: documents continue others, so that what follows a token depends on the branch.
    """

    layout: Layout
    shift: int

    def __post_init__(self) -> None:
        if self.layout.heads is not None:
            raise PlanError("roll: the layout splits heads; only rows with all heads can be rolled")
        if self.layout.documents.trees is not None:
            raise ConfigError(
                "roll: documents have parents, and what follows a token depends on the branch; valid: documents "
                "without parents, or the targets of PackedTrajectories"
            )

    @cached_property
    def documents(self) -> Documents:
        """The documents without `shift` tokens each; those that have no more are empty."""
        return Documents(np.maximum(self.layout.documents.lengths - abs(self.shift), 0))

    @cached_property
    def _source(self) -> tuple[Layout, np.ndarray]:
        return self._without_first(max(self.shift, 0))

    @cached_property
    def _target(self) -> tuple[Layout, np.ndarray]:
        return self._without_first(max(-self.shift, 0))

    @cached_property
    def redistribution(self) -> Redistribution:
        """The move of the shorter documents: `sends_and_receives` and `local_pair` list the rows of each pair of ranks.

        Row numbers are indices in :meth:`source_rows` of the sender and :meth:`target_rows` of the receiver.
        """
        return Redistribution(self._source[0], self._target[0], 1)

    def source_rows(self, rank: int) -> np.ndarray:
        """Return the rows of a rank that other rows get, ascending, int64."""
        return _rows_of_rank(*self._source, rank)

    def target_rows(self, rank: int) -> np.ndarray:
        """Return the rows of a rank that get a row, ascending, int64; its other rows are filled."""
        return _rows_of_rank(*self._target, rank)

    def _without_first(self, skipped: int) -> tuple[Layout, np.ndarray]:
        """Return the layout in which token p of each shorter document is where its token p + `skipped` was, and the
        row that the first token of each span had, int64 [spans]."""
        spans, short = self.layout.spans, self.documents
        doc = spans["doc"]
        begin, end = (spans[side] - self.layout.documents.offsets[doc] for side in ("start", "stop"))
        first, last = (np.clip(position - skipped, 0, short.lengths[doc]) for position in (begin, end))
        kept = last > first
        out = spans[kept]
        out["start"], out["stop"] = (short.offsets[doc] + first)[kept], (short.offsets[doc] + last)[kept]
        first_rows = self.layout.span_first_rows + first + skipped - begin
        return Layout(short, self.layout.ranks, out), first_rows[kept]


def _rows_of_rank(layout: Layout, first_rows: np.ndarray, rank: int) -> np.ndarray:
    spans = layout.rank_spans(rank)
    first = first_rows[layout.span_offsets[rank] : layout.span_offsets[rank + 1]]
    return ragged_arange(first, spans["stop"] - spans["start"])
