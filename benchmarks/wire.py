"""Counts the bytes that a rank sends, where they are handed to torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from mindspeed_cp.comm import GroupTransport, Pending, Transfer


@contextmanager
def count_sent_bytes() -> Iterator[Counter[int]]:
    """Count the bytes that this rank sends inside the block, by the rank that receives them."""
    sent: Counter[int] = Counter()
    post = GroupTransport.post

    def counting(self: GroupTransport, transfers: Sequence[Transfer], all_to_all: bool = False) -> list[Pending]:
        for transfer in transfers:
            if transfer.sends:
                sent[transfer.peer] += transfer.tensor.nbytes
        return post(self, transfers, all_to_all)

    with patch.object(GroupTransport, "post", counting):
        yield sent
