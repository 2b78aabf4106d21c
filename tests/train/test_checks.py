"""What ranks are told whose batches or contents differ, by the digests that they gather."""

from __future__ import annotations

import pytest
import torch

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.train.checks import check_calls, check_digests

EQUAL = [[5, 7, 9], [5, 7, 9], [5, 8, 9], [5, 8, 9], [5, 6, 9], [5, 6, 9]]  # three replicas of two ranks


def told(column: int, *ranks: int, replicas: int = 3, digests: list[list[int]] = EQUAL) -> str:
    of_ranks = torch.tensor(digests, dtype=torch.float64)
    of_ranks[list(ranks), column] += 1
    with pytest.raises(ConfigError) as caught:
        check_digests(of_ranks, 12, torch.arange(len(digests)).view(replicas, -1).tolist())
    return str(caught.value)


def test_replicas_read_other_documents_and_their_ranks_the_same() -> None:
    check_digests(torch.tensor(EQUAL, dtype=torch.float64), 12, [[0, 1], [2, 3], [4, 5]])
    assert told(1, 3).startswith("step 12: ranks 2, 3 of 6 read the contents of the same documents differently")
    assert "any of them may be wrong" in told(1, 3), "of two ranks nobody knows which"
    assert told(1, 1, 5).startswith("step 12: ranks 0, 1, 4, 5 of 6 read the contents")
    three = told(1, 4, replicas=1, digests=[[5, 7, 9]] * 5)
    assert three.startswith("step 12: rank 4 of 5 read") and "from the other ranks of 5" in three


def test_what_all_ranks_read_is_compared_over_replicas() -> None:
    assert told(2, 4, 5).startswith("step 12: ranks 4, 5 of 6 read the contents of the same documents")


def test_other_documents_are_told_first() -> None:
    assert told(0, 2).startswith("step 12: rank 2 has assigned documents to replicas differently")
    assert told(0, 2, 3).startswith("step 12: ranks 2, 3 have assigned documents to replicas differently")


def calls_told(digests: list[float], plans: list[list[int]]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_calls(torch.tensor(digests), 12, plans)
    return str(caught.value)


def test_calls_are_compared_among_the_ranks_of_each_plan() -> None:
    check_calls(torch.tensor([4.0, 4, 4, 7, 7, 7]), 12, [[0, 1, 2], [3, 4, 5]])
    text = calls_told([4.0, 4, 4, 7, 8, 7], [[0, 1, 2], [3, 4, 5]])
    assert text.startswith("step 12: rank 4 called attention differently") and "from the other ranks of 6" in text
    text = calls_told([4.0, 5, 4, 5, 7, 8, 7, 9], [[0, 2], [1, 3], [4, 6], [5, 7]])
    assert text.startswith("step 12: ranks 5, 7 called attention differently") and "any of them may be wrong" in text
