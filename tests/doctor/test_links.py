"""The time limit of the doctor's links between NPUs: it grows with their number, and can be given."""

from __future__ import annotations

import pytest

from mindspeed_cp.cli.main import run
from mindspeed_cp.comm.local_ranks import NO_ANSWER
from mindspeed_cp.doctor.links import links_time_limit, ring_rows


def test_the_limit_grows_with_the_devices() -> None:
    assert links_time_limit(8) - links_time_limit(7) == links_time_limit(2) - links_time_limit(1) > 0
    assert links_time_limit(16) > 300


def test_a_limit_that_is_reached_names_itself_and_who_says_what_goes_first() -> None:
    [row] = ring_rows({1: [("ring of 2", True, 1.0)], 0: NO_ANSWER}, 42.0)
    assert not row["ok"] and row["error"] == "rank 0: no answer within 42 s (--link-seconds)"
    [row] = ring_rows({0: NO_ANSWER, 1: "RuntimeError: HCCL function error"}, 42.0)
    assert row["error"] == "rank 1: RuntimeError: HCCL function error"


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_a_limit_of_nothing_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--link-seconds", seconds]) == 2
    assert f"--link-seconds {seconds}: must be above 0, at most 86400, or left out" in capsys.readouterr().err
