"""Cases on one rank and on the ranks of a layout, each run once for all tests of a file, and what equal outcomes are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.megatron.gpt import Case, Outcome, available, named, on_ranks, one_rank, planned
from tests.megatron.ranks import MegatronRanks
from tests.processes import RankError

#: Tensor-, context- and expert-parallel ranks, and all ranks if more than tensor times context.
Layout = tuple[int, ...]
LAYOUTS: dict[str, Layout] = {
    "cp2": (1, 2), "cp3": (1, 3), "cp4": (1, 4), "tp2 x cp2": (2, 2), "cp4 ep4": (1, 4, 4, 4),
    "dp2 cp2 ep4": (1, 2, 4, 4), "tp2 cp2 ep1": (2, 2, 1, 4), "tp2 cp2 ep2": (2, 2, 2, 4),
}  # fmt: skip


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


def on_layouts(
    cases: Mapping[str, Case], default: Mapping[str, Collection[str]], not_on_tensor_ranks: Collection[str] = ()
) -> list[Any]:
    """Pytest's parameters of every layout: its name, that of a case, and those that are computed with it; `thorough` but
    for the default cases of the layout."""
    parameters = []
    for layout, names in default.items():
        excluded = not_on_tensor_ranks if LAYOUTS[layout][0] > 1 else ()
        known = [name for name in available(cases) if name not in excluded]
        for case in named({name: case for name, case in cases.items() if name not in excluded}):
            among = tuple(name for name in known if (name in names) == (case.id in names))
            marks = [*case.marks, *([] if case.id in names else [pytest.mark.thorough])]
            parameters.append(pytest.param(layout, case.id, among, id=f"{layout}-{case.id}", marks=marks))
    return parameters


class Runs:
    """Outcomes of cases, by their names; cases that share processes and groups are computed together, a few at a time.

    Args:
        ranks: processes.
        cases: the cases.
        run: what one rank computes of a case.
        reference: of one rank, with cases of the same names; default: these.
    """

    CASES_AT_A_TIME = 5

    def __init__(
        self,
        ranks: MegatronRanks,
        cases: Mapping[str, Case],
        run: Callable[[Case], Outcome] = planned,
        reference: Runs | None = None,
    ) -> None:
        self._ranks, self._cases, self._run, self._reference = ranks, dict(cases), run, reference or self
        self._alone: dict[str, Outcome] = {}
        self._done: dict[tuple[Layout, tuple[str, ...]], list[dict[str, Outcome]] | RankError] = {}

    def _together(self, name: str, among: Sequence[str]) -> tuple[str, ...]:
        names = tuple(among) or tuple(self._cases)
        first = names.index(name) // self.CASES_AT_A_TIME * self.CASES_AT_A_TIME
        return names[first : first + self.CASES_AT_A_TIME]

    def alone(self, name: str) -> Outcome:
        """The outcome of a case on one rank."""
        if name not in self._alone:
            with one_rank():
                self._alone |= {known: self._run(self._cases[known]) for known in self._together(name, ())}
        return self._alone[name]

    def check(self, name: str, layout: Layout, among: Sequence[str] = ()) -> None:
        """Compare a case on every rank of a layout with one rank; it is computed with others, all or those named."""
        names = self._together(name, among)
        if (layout, names) not in self._done:
            tp, cp, ep, *size = (*layout, 1) if len(layout) == 2 else layout
            try:
                cases = [self._cases[known] for known in names]
                outcomes = self._ranks.run(*size or [tp * cp], on_ranks, tp, cp, cases, ep)
                self._done[layout, names] = [dict(zip(names, of_rank, strict=True)) for of_rank in outcomes]
            except RankError as error:
                self._done[layout, names] = error
        done = self._done[layout, names]
        if isinstance(done, RankError):
            raise done
        for of_rank in done:
            assert_equal(of_rank[name], self._reference.alone(name))


def equal_to_one_rank(
    ranks: MegatronRanks, layout: Layout, cases: Mapping[str, tuple[Case, Case]], reference: Runs | None = None
) -> None:
    """Compare cases on the ranks of a layout, each with another case on one rank, which `reference` may have."""
    alone = reference or Runs(ranks, {name: case for name, (_, case) in cases.items()})
    runs = Runs(ranks, {name: case for name, (case, _) in cases.items()}, reference=alone)
    for name in cases:
        runs.check(name, layout)
