"""Cases on one rank and on the ranks of a layout, each run once for all tests of a file, and what equal outcomes are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tests.megatron.gpt import Case, Outcome, on_ranks, one_rank, planned
from tests.megatron.ranks import MegatronRanks
from tests.processes import RankError

#: Tensor-, context- and expert-parallel ranks, and all ranks if more than tensor times context.
Layout = tuple[int, ...]
LAYOUTS: dict[str, Layout] = {"cp2": (1, 2), "cp3": (1, 3), "cp4": (1, 4), "tp2 x cp2": (2, 2)}


def assert_equal(actual: Outcome, expected: Outcome) -> None:
    """Same count, loss, later losses, gradients or weights, each tensor to 1e-5 of its largest element."""
    assert actual.tokens == expected.tokens
    assert actual.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert actual.later_losses == pytest.approx(expected.later_losses, rel=1e-5, abs=1e-7)
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_allclose(
            actual.tensors[name], tensor, rtol=0, atol=1e-5 * max(1e-8, float(np.abs(tensor).max())), err_msg=name
        )


class Runs:
    """Outcomes of cases, by their names.

    Args:
        ranks: processes.
        cases: the cases.
        run: what one rank computes of a case.
    """

    def __init__(
        self, ranks: MegatronRanks, cases: Mapping[str, Case], run: Callable[[Case], Outcome] = planned
    ) -> None:
        self._ranks, self._cases, self._run = ranks, dict(cases), run
        self._alone: dict[str, Outcome] = {}
        self._done: dict[tuple[Layout, tuple[str, ...]], list[dict[str, Outcome]] | RankError] = {}

    def alone(self, name: str) -> Outcome:
        """The outcome of a case on one rank."""
        if not self._alone:
            with one_rank():
                self._alone = {known: self._run(case) for known, case in self._cases.items()}
        return self._alone[name]

    def on(self, layout: Layout, names: tuple[str, ...] = ()) -> list[dict[str, Outcome]]:
        """The outcomes of all cases, or of some, of every rank of a layout."""
        key = (layout, names)
        if key not in self._done:
            tp, cp, ep, *size = (*layout, 1) if len(layout) == 2 else layout
            cases = {name: self._cases[name] for name in names or self._cases}
            try:
                outcomes = self._ranks.run(*size or [tp * cp], on_ranks, tp, cp, list(cases.values()), ep)
                self._done[key] = [dict(zip(cases, outcome, strict=True)) for outcome in outcomes]
            except RankError as error:
                self._done[key] = error
        done = self._done[key]
        if isinstance(done, RankError):
            raise done
        return done

    def check(self, name: str, layout: Layout, names: tuple[str, ...] = ()) -> None:
        """Compare every rank's outcome of a case with that of one rank."""
        for outcomes in self.on(layout, names):
            assert_equal(outcomes[name], self.alone(name))


def equal_to_one_rank(
    ranks: MegatronRanks,
    layout: Layout,
    cases: Mapping[str, tuple[Case, Case]],
    run: Callable[[Case], Outcome] = planned,
) -> None:
    """Compare cases on the ranks of a layout, each with another case, which `run` computes on one rank."""
    runs = Runs(ranks, {name: case for name, (case, _) in cases.items()})
    reference = Runs(ranks, {name: case for name, (_, case) in cases.items()}, run)
    for outcomes in runs.on(layout):
        for name, outcome in outcomes.items():
            assert_equal(outcome, reference.alone(name))
