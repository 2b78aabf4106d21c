"""The sentence that names the fastest algorithm and why."""

from typing import Any, cast

import pytest

from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import AlgorithmResult, Comparison, LayerMetrics
from mindspeed_cp.report.simulation import conclusion


def result(name: str, attention: float, exposed: float, late: float = 0.0, ring: float = 10e-3) -> AlgorithmResult:
    seconds = attention + 2e-3 + exposed + late
    metrics = LayerMetrics(
        seconds, ring / seconds, 1e-3 / seconds, 0.0, attention, 2e-3, exposed, late, 0.0, 0.0, 0.0, 0.0, ()
    )
    return AlgorithmResult(Candidate(name), metrics, cast(Any, None))


def comparison(*results: AlgorithmResult) -> Comparison:
    ordered = sorted(results, key=lambda result: result.metrics.seconds)
    ring = next(result for result in ordered if result.name == "ring")
    return Comparison(cast(Any, None), 1e-3, ring, tuple(ordered), {}, ())


RING = result("ring", 4e-3, 4e-3)


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ([RING], "ring takes 10.00 ms a layer (modelled); no other algorithm was compared."),
        (
            [RING, result("direct", 4e-3, 2e-3)],
            "direct is the fastest: 8.00 ms a layer (modelled), 1.25 times as fast as ring, because it waits 2.00 ms less "
            "for messages.",
        ),
        (
            [RING, result("direct", 4e-3, 2e-3), result("ulysses", 2e-3, 1e-3)],
            "ulysses is the fastest: 5.00 ms a layer (modelled), 1.60 times as fast as direct, because it computes "
            "attention in 2.00 ms less; 2.00 times as fast as the even ring.",
        ),
        (
            [RING, result("direct", 4e-3, 1e-3, 3.05e-3)],
            "Tie: ring and direct take 10.00 ms a layer (modelled), within 1 % of each other.",
        ),
        (
            [RING, result("direct", 4e-3, 2e-3), result("hybrid", 4e-3, 2.01e-3)],
            "Tie: direct and hybrid take 8.00 ms a layer (modelled), within 1 % of each other, 1.25 times as fast as ring, "
            "because direct waits 2.00 ms less for messages.",
        ),
        (
            [RING, result("hybrid", 4e-3, 2e-3), result("direct", 4e-3, 2e-3, 1e-3)],
            "hybrid is the fastest: 8.00 ms a layer (modelled), 1.12 times as fast as direct, because it waits 1.00 ms less "
            "for the slowest rank; 1.25 times as fast as the even ring.",
        ),
    ],
    ids=["alone", "messages", "kernels", "tie of all", "tie", "slowest rank"],
)
def test_the_fastest_or_the_tie_is_named_with_its_cause(results: list[AlgorithmResult], sentence: str) -> None:
    assert conclusion(comparison(*results)) == sentence
