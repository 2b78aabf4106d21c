"""Settings with the other algorithms of train.compare."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError


def suite(compare: Any = None, **changes: Any) -> Settings:
    section: dict[str, Any] = {"context_parallel_size": 2, **changes}
    return Settings(data={"seq_length": 517}, train={"compare": compare or []}, context_parallel_suite=section)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compare", "said"),
    [
        (["rings"], "train.compare = \"rings\": cannot be used: algorithm is 'rings': unknown algorithm"),
        (["hybrid:window=2"], "'window=2': hybrid has no such option; valid: ulysses_degree=..., layout=..."),
        (["hybrid:ulysses_degree=2:ulysses_degree=4"], "ulysses_degree is given twice"),
        (["hybrid:ulysses_degree=3"], "must be a divisor of the 2 ranks: 1, 2 or null"),
        (["ring:layout=round"], "layout is 'round'; valid: one of zigzag, contiguous, balanced"),
        (3, "train.compare = 3: must be a list of texts"),
        ([3], "train.compare.0 = 3: must be "),
    ],
)
def test_algorithms_that_cannot_be_compared_are_refused(compare: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        suite(compare)
    assert said in str(caught.value) and "\n" not in str(caught.value)
