"""Choice of an algorithm and its options for given batches on a cluster.  NumPy only."""

from __future__ import annotations

from mindspeed_cp.choose.candidates import Candidate, default_candidates, parse_candidate
from mindspeed_cp.choose.choose import Decision, choose_algorithm
from mindspeed_cp.choose.compare import Comparison, SimulationCase, compare_algorithms

__all__ = [
    "Candidate",
    "Comparison",
    "Decision",
    "SimulationCase",
    "choose_algorithm",
    "compare_algorithms",
    "default_candidates",
    "parse_candidate",
]
