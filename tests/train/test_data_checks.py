"""What ranks are told whose batches or contents differ, by the digests that they gather."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.data_checks import check_digests

EQUAL = [[5, 7, 9], [5, 7, 9], [5, 8, 9], [5, 8, 9], [5, 6, 9], [5, 6, 9]]  # three replicas of two ranks


def told(column: int, *ranks: int, replicas: int = 3) -> str:
    digests = torch.tensor(EQUAL, dtype=torch.float64)
    digests[list(ranks), column] += 1
    with pytest.raises(ConfigError) as caught:
        check_digests(digests, 12, replicas)
    return str(caught.value)


def test_replicas_read_other_documents_and_their_ranks_the_same() -> None:
    check_digests(torch.tensor(EQUAL, dtype=torch.float64), 12, 3)
    assert told(1, 3).startswith("step 12: rank 3 of 6 read other contents of the same documents")
    assert told(1, 1, 5).startswith("step 12: ranks 1, 5 of 6 read other contents")


def test_what_all_ranks_read_is_compared_over_replicas() -> None:
    assert told(2, 4, 5).startswith("step 12: ranks 4, 5 of 6 read other contents of the same documents")


def test_other_documents_are_told_first() -> None:
    assert told(0, 2).startswith("step 12: rank 2 has assigned documents to replicas differently")
    assert told(0, 2, 3).startswith("step 12: ranks 2, 3 have assigned documents to replicas differently")
