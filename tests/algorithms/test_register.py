"""An algorithm from outside: registered, then checked, proved, simulated, drawn and chosen like the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import pytest

from mindspeed_cp import (
    AttentionConfig,
    ConfigError,
    Documents,
    Plan,
    Topology,
    build_plan,
    register_algorithm,
    simulate_plan,
    verify_plan,
)  # fmt: skip
from mindspeed_cp.algorithms import ALGORITHMS, ALIASES, algorithm_options
from mindspeed_cp.algorithms.options import AtLeast, DividesRanks
from mindspeed_cp.algorithms.registry import COMMON_OPTIONS
from mindspeed_cp.choose.candidates import parse_candidate
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.layout import contiguous, zigzag
from mindspeed_cp.plan import Messages
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import CONTENT
from mindspeed_cp.report.files import write_png
from mindspeed_cp.report.plan import PlanSummary
from mindspeed_cp.report.tile_map import tile_map


def build_whole(documents: Documents, kv_documents: Documents, topology: Topology, attention: AttentionConfig, *,
                stride: Annotated[int, AtLeast(1, "ranks")] = 1,
                group: Annotated[int | None, DividesRanks()] = None,
                layout: Literal["zigzag", "contiguous"] = "zigzag") -> Plan:  # fmt: skip
    """Every document on one rank: nothing is sent.

    Args:
        documents: lengths of the documents.
        kv_documents: lengths of their keys.
        topology: context-parallel ranks.
        attention: attention of one layer.
        stride: distance of the ranks of two documents that follow
            each other.
        group: only the first ranks get documents; default: all ranks.
        layout: "zigzag" or "contiguous"; the same here.
    """
    ranks = topology.ranks
    owner = [[index * stride % (group or ranks)] for index in range(len(documents))]
    make = zigzag if layout == "zigzag" else contiguous
    q_layout = make(documents, ranks, owner)
    kv_layout = q_layout if kv_documents == documents else make(kv_documents, ranks, owner)
    contents = np.zeros(ranks, CONTENT)
    contents["rank"], contents["first"] = np.arange(ranks), kv_layout.span_offsets[:-1]
    contents["count"] = np.diff(kv_layout.span_offsets)
    program = Program(
        1, kv_layout.token_counts[:, None], q_layout, kv_documents, attention, contents[contents["count"] > 0],
        kv_layout.spans, Messages.empty(), Messages.empty(),
    )  # fmt: skip
    return Plan("whole", attention, topology, q_layout, kv_layout, q_layout, kv_layout, program, program)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_algorithm("whole", build_whole, aliases=("one_rank",), use_for="short documents")
    yield
    del ALGORITHMS["whole"], ALIASES["one_rank"]


DOCUMENTS, TOPOLOGY, ATTENTION = Documents([700, 30, 410, 90]), Topology(1, 4), AttentionConfig(4, 2)


def test_it_is_proved_simulated_and_drawn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = build_plan(DOCUMENTS, TOPOLOGY, ATTENTION, "one_rank", stride=3)
    verify_plan(plan)
    assert simulate_plan(plan, load_cluster("a2").with_ranks(4)).total > 0
    write_png(tile_map(PlanSummary(plan)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_it_is_chosen_by_name_with_its_options() -> None:
    candidate = parse_candidate("one_rank:stride=2:layout=contiguous")
    assert str(candidate) == "whole (stride 2, layout contiguous)"
    verify_plan(build_plan(DOCUMENTS, TOPOLOGY, ATTENTION, candidate.algorithm, **dict(candidate.options)))


def test_its_signature_and_docstring_declare_its_options() -> None:
    stride, group, layout, reduce_dtype, latents = algorithm_options("whole").values()
    assert (stride.name, stride.type, stride.default, stride.minimum) == ("stride", int, 1, 1)
    assert stride.description == "distance of the ranks of two documents that follow each other."
    assert group.divides_ranks and group.optional and group.default is None
    assert layout.choices == ("zigzag", "contiguous") and layout.type is str
    assert reduce_dtype == COMMON_OPTIONS["reduce_dtype"] and reduce_dtype.choices == ("float32", "bfloat16")
    assert latents == COMMON_OPTIONS["latents"] and latents.choices == ("auto", "on", "off")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strid": 2}, "algorithm 'whole' has no option 'strid'; did you mean stride? valid: stride, group"),
        ({"stride": 0}, "stride is 0; valid: a whole number of ranks >= 1"),
        ({"stride": "2"}, "stride is '2'; valid: a whole number of ranks >= 1"),
        ({"stride": None}, "stride is None; valid: a whole number of ranks"),
        ({"group": 3}, "group is 3; valid: a divisor of the 4 ranks: 1, 2, 4"),
        ({"layout": "balanced"}, "layout is 'balanced'; valid: one of zigzag, contiguous"),
        ({"layout": True}, "layout is True; valid: one of zigzag, contiguous"),
    ],
)
def test_its_options_are_checked(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_plan(DOCUMENTS, TOPOLOGY, ATTENTION, "whole", **options)
    assert expected in str(error.value)


def test_functions_without_declared_options_are_not_registered() -> None:
    def no_default(documents, kv_documents, topology, attention, *, stride: int): ...  # type: ignore[no-untyped-def]
    def no_type(documents, kv_documents, topology, attention, *, stride=1): ...  # type: ignore[no-untyped-def]
    def no_text(documents, kv_documents, topology, attention, *, stride: int = 1): ...  # type: ignore[no-untyped-def]
    def a_list(documents, kv_documents, topology, attention, *, stride: list[int] | None = None):  # type: ignore[no-untyped-def]
        """.

        Args:
            stride: ranks.
        """

    def other_names(lengths, topology): ...  # type: ignore[no-untyped-def]

    for builder, expected in (
        (no_default, "a keyword-only argument with a type and a default"), (no_type, "a keyword-only argument"),
        (no_text, "has no line in the docstring's Args"), (a_list, "valid types: bool, int"),
        (other_names, "first arguments documents, kv_documents"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=expected):
            register_algorithm("another", builder)
    for name in ("ring", "p2p", "auto", "whole"):
        with pytest.raises(ConfigError, match="is taken"):
            register_algorithm(name, build_whole)
