"""Sentences about figures that are made up: slow links, devices, wrong results, failures; and the page of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from mindspeed_cp.cluster_check.html_parts import heat_html
from mindspeed_cp.cluster_check.page import page
from mindspeed_cp.cluster_check.results import CheckResults, layer_seconds, median_measurements
from mindspeed_cp.cluster_check.supervisor import Failure
from mindspeed_cp.cluster_check.verdict import findings, is_ok

REQUEST = {"device": "cpu", "dtype": "fp32", "heads": 8, "head_dim": 64, "tokens_per_rank": 512}


def link(
    kind: str, first: int, second: int, there: float = 1e9, back: float = 1e9, both: float = 1e9
) -> dict[str, Any]:
    pair = {"pair": [first, second], "kind": kind, "bytes": 1 << 20, "latency": 1e-5}
    return {**pair, "there": there, "back": back, "both": both}


def algorithm(name: str, measured: float = 0.010, predicted: float | None = 0.009, **others: Any) -> dict[str, Any]:
    return {
        "batch": "one long document", "algorithm": name, "measured": measured, "predicted": predicted,
        "predicted_attention": 0.008, "predicted_exposed": 0.001, "busy": {"compute": 0.008, "wait": 0.001},
        "wrong": None, "queries": 64, "sent": [100, 200], **others,
    }  # fmt: skip


def facts(node: int, local: int, **others: Any) -> dict[str, Any]:
    return {
        "node": node, "local_rank": local, "host": f"h{node}", "device": "CPU", "memory": 1 << 34, "free": 1 << 33,
        "memory_of": f"h{node}", "cores": 2, "threads": 1, "versions": {"torch": "2.13.0"}, "refused": [],
        "environment": {"OMP_NUM_THREADS": "1"}, **others,
    }  # fmt: skip


@pytest.fixture
def results() -> CheckResults:
    """A healthy check of two nodes of two ranks."""
    kernels = [
        {"kind": kind, "seconds": 1e-3, "flops": 1e9, "short_side": 64.0, "calls": 2.0}
        for kind in ("attention", "linear")
    ]
    overlap = {"partner": 0, "bytes": 100, "compute": 2.0, "send": 1.0, "receive": 1.0, "exchange": 1.0}
    overlap |= {"compute+send": 2.0, "compute+receive": 2.0, "compute+exchange": 2.1}
    return CheckResults(
        REQUEST, 2, 2,
        ranks=[facts(node, local) for node in range(2) for local in range(2)],
        links=[link("in_node", 0, 1), link("in_node", 2, 3), link("network", 0, 2), link("network", 1, 3)],
        together=[{"rank": r, "kind": "network_all", "sent": 100, "rate": 0.9e9} for r in range(4)],
        forwarding=[
            {"source": 0, "target": 2, "forwarded": f, "bytes": 100, "seconds": 1.0, "rate": 1e9 * (1 + f)}
            for f in (False, True)
        ],
        kernels=dict.fromkeys(range(4), kernels),
        overlap=[{"rank": r, **overlap} for r in range(4)],
        batches={"one long document": [2048]},
        algorithms=[algorithm("ring"), algorithm("direct")],
        seconds={"links": 1.0},
        finished=True,
    )  # fmt: skip


def texts(results: CheckResults, level: str) -> list[str]:
    return [finding.text for finding in findings(results) if finding.level == level]


def test_a_healthy_cluster_has_nothing_but_good_news(results: CheckResults) -> None:
    assert is_ok(results) and not texts(results, "bad") and not texts(results, "warning")
    assert "all 2 runs of algorithms agree with the fp64 reference (128 sampled queries)" in texts(results, "good")


def test_a_slow_direction_is_named_with_its_ends(results: CheckResults) -> None:
    results.links[3] = link("network", 1, 3, back=2e8)
    (text,) = texts(results, "warning")[:1]
    assert text == "link 3 to 1 (between nodes) carries 200 MB/s, 20% of the median"
    assert is_ok(results)  # slow is not wrong


def test_a_rank_whose_links_are_all_slow_is_named_first(results: CheckResults) -> None:
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    results.links = [link("in_node", a, b, *([1e8] * 3 if 2 in (a, b) else [])) for a, b in pairs]
    text = next(text for text in texts(results, "warning") if "look at its NIC" in text)
    assert "6 of the slow directions begin or end at rank 2" in text


def test_directions_that_hold_each_other_up(results: CheckResults) -> None:
    results.links[0]["both"] = 5e8
    assert any("1 of 2 links inside nodes are slower when both" in text for text in texts(results, "warning"))


def test_nics_that_are_slower_together(results: CheckResults) -> None:
    for row in results.together[:2]:
        row["rate"] = 4e8
    assert [text for text in texts(results, "warning") if text.startswith("node ")] == [
        "node 0: with all NICs at once 800 MB/s leave it, 40% of what its ranks reach alone"
    ]


def test_forwarding_that_gains_nothing(results: CheckResults) -> None:
    results.forwarding[1]["rate"] = 1e9
    assert any(
        "1.00 times as fast as over one; hierarchical gains nothing" in text for text in texts(results, "warning")
    )


def test_a_slow_device(results: CheckResults) -> None:
    results.kernels[3] = [{**row, "seconds": 2e-3} for row in results.kernels[3]]
    assert "rank 3 computes attention at 50% of the median of all ranks" in texts(results, "warning")


def test_messages_that_do_not_hide(results: CheckResults) -> None:
    results.overlap[2]["compute+exchange"] = 3.0
    assert "messages hide badly behind kernels: rank 2 0%" in texts(results, "warning")


def test_ranks_that_differ(results: CheckResults) -> None:
    results.ranks[1] = facts(0, 1, versions={"torch": "2.7.0"}, environment={}, host="other")
    told = texts(results, "warning")
    assert "ranks have different versions of torch: 2.13.0, 2.7.0" in told
    assert "ranks have different values of OMP_NUM_THREADS: 1, not set" in told
    assert "ranks of node 0 run on several machines" in told


def test_a_simulator_that_is_off(results: CheckResults) -> None:
    results.algorithms[0]["predicted"] = 0.002
    assert any("off by 45% in the mean, 80% at worst, over 2 runs" in text for text in texts(results, "warning"))


def test_wrong_results_and_failures_come_first_and_fail_the_check(results: CheckResults) -> None:
    results.algorithms[1]["wrong"] = "the output of queries 3 to 5 differs"
    assert not is_ok(results)
    assert texts(results, "bad") == ["direct on one long document: the output of queries 3 to 5 differs"]
    item = {"kind": "network", "pairs": [[1, 3]]}
    failed = replace(results, failures=[Failure("links", item, {3: "no answer", 1: "no answer"})], algorithms=[])
    assert not is_ok(failed) and findings(failed)[0].text == "links (1 - 3): rank 3: no answer"


def test_the_page_has_all_that_was_measured_and_escapes_it(results: CheckResults) -> None:
    results.failures.append(Failure("links", {"kind": "network", "pairs": [[1, 3]]}, {3: "<script>alert(1)</script>"}))
    results.links.pop()
    results.algorithms += [
        {"batch": "one long document", "algorithm": "ulysses", "predicted": None, "refused": "8 heads & 3 ranks"},
        {"batch": "one long document", "algorithm": "hybrid", "predicted": 0.1, "error": "rank 1: hung"},
    ]
    results.ranks[2] = None
    text = page(results, {"one long document": b"\x89PNG"})
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert "refused: 8 heads &amp; 3 ranks" in text and "FAILED: rank 1: hung" in text
    assert "data:image/png;base64,iVBORw==" in text and "http" not in text
    assert re.search(
        r"<td class='left'>ring</td><td class=''>10.00</td><td class=''>9.00</td><td class=''>0.90</td>", text
    )
    assert "FAILED: gave no answer" in text and "Not finished" not in text
    assert text.count("<td class='bad'>failed</td>") == len({"there", "both"}) * len({(1, 3), (3, 1)})


def test_a_link_that_failed_is_told_from_one_of_another_kind() -> None:
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", heat_html("t", 2, {(0, 1): 5.0}, "GB/s", {(0, 1), (1, 0)}))
    assert cells == ["", "5", "failed", ""]


def test_a_page_of_nothing_is_a_page(results: CheckResults) -> None:
    text = page(CheckResults(REQUEST, 2, 2), {})
    assert "Not finished" in text and text.count("<section>") == 1


def test_times_are_of_the_slowest_rank_and_kernels_of_the_middle_one() -> None:
    assert layer_seconds({0: {"seconds": [1.0, 5.0, 2.0]}, 1: {"seconds": [3.0, 1.0, 1.0]}}) == 3.0
    rows = {rank: [{"kind": "linear", "seconds": s, "flops": 2.0}] for rank, s in enumerate((1.0, 9.0, 2.0))}
    assert median_measurements(rows) == [{"kind": "linear", "seconds": 2.0, "flops": 2.0}]
