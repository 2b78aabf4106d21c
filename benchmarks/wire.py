"""Counts the bytes that a rank sends, where they are handed to torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from mindspeed_cp.comm import Pending, Transfer, Transport

KINDS = {"K and V": "fetch", "dK and dV": "reduce"}


@contextmanager
def wire() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends while the context lasts, by kind: "fetch" (keys and values), "reduce" (their
    gradients) and "move" (between layouts)."""
    found = {"fetch": 0, "reduce": 0, "move": 0}
    post = Transport.post

    def counting(self: Transport, transfers: Sequence[Transfer], with_all: bool = False) -> list[Pending]:
        for transfer in transfers:
            if transfer.sends:
                found[KINDS.get(transfer.what.split(",")[0], "move")] += transfer.tensor.nbytes
        return post(self, transfers, with_all)

    with patch.object(Transport, "post", counting):
        yield found
