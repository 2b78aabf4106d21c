"""The page of a comparison: one file that needs nothing else, and works in a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, ConfigError, Documents, Topology
from mindspeed_cp.choose.candidates import Candidate
from mindspeed_cp.choose.compare import AlgorithmResult, Comparison, SimulationCase, compare_algorithms
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.report.simulation.details import ComputedTiles, document_shares
from mindspeed_cp.report.simulation.html_page import TIME_UNIT, page_data, write_html
from mindspeed_cp.report.text import format_bytes as size_text
from tests.report.browser import MISSING, Browser, find_browser

LENGTHS = [3000, 40, 900, 5200, 260]
WANTED = [
    Candidate("hierarchical"),
    Candidate("ulysses"),
    Candidate("hybrid", (("ulysses_degree", 4),)),
    Candidate("direct"),
]


def compared() -> Comparison:
    attention = AttentionConfig(8, 8, 64)
    cluster = load_cluster("a2").with_ranks(3)
    source = "lengths of </script> & <b>"
    problem = SimulationCase(
        (Documents(LENGTHS),), Topology(2, 3, "a2"), attention, cluster, LayerCost.for_attention(attention), source
    )
    return compare_algorithms(problem, WANTED)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compared()


@pytest.fixture(scope="module")
def file(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_html(comparison, tmp_path_factory.mktemp("page") / "out.html")


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(MISSING)
    with Browser(program) as started:
        yield started


@pytest.fixture
def browser(started: Browser, file: Path) -> Iterator[Browser]:
    """The page, just opened; it must throw nothing and ask for nothing but itself."""
    started.requests.clear()
    started.open(file)
    started.wait_for("document.body.dataset.chosen !== undefined")
    yield started
    assert started.errors == [] and started.requests == [file.as_uri()]


def data_of(file: Path) -> dict[str, Any]:
    """What the page's script unpacks."""
    script = re.search(r'id="data">([^<]*)</script>', file.read_text())
    assert script is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(script[1])))
    return data


def test_the_page_has_the_data_and_asks_for_nothing(comparison: Comparison, file: Path) -> None:
    text = file.read_text()
    assert re.search(r"https?:|//\w+\.\w+|\bimport\b|<link|\bsrc=|@import|url\(", text) is None
    assert "default-src 'none'" in text
    assert data_of(file) == json.loads(json.dumps(page_data(comparison)))
    assert file.stat().st_size < 200_000


def test_times_of_the_data_are_those_of_the_timelines(comparison: Comparison, file: Path) -> None:
    for result, drawn in zip(comparison.results, data_of(file)["algorithms"], strict=True):
        timeline = result.timeline
        assert drawn["name"] == result.name and drawn["total"] == round(timeline.total / TIME_UNIT)
        for direction, times in zip(
            drawn["directions"], (timeline.steps_forward, timeline.steps_backward), strict=True
        ):
            borders = np.cumsum(direction["times"], axis=1)
            np.testing.assert_allclose(borders[:, 1::2] * TIME_UNIT, times[:, :, 1], atol=TIME_UNIT)
            np.testing.assert_allclose(borders[:, 2::2] * TIME_UNIT, times[:, :, 2], atol=TIME_UNIT)
        sent = sum(message[7] for direction in drawn["directions"] for message in direction["messages"])
        assert sent == timeline.bytes_sent.sum()
        np.testing.assert_allclose(np.array(drawn["per_rank"]["exposed"]) * TIME_UNIT, timeline.exposed, atol=TIME_UNIT)


def test_a_page_that_cannot_be_written_is_one_line(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html .*: cannot be written: "):
        write_html(comparison, tmp_path / "none" / "out.html")


def rows(browser: Browser) -> list[str]:
    """Names in the table, from top to bottom."""
    names: list[str] = browser.run("[...document.querySelectorAll('#algorithms tbody tr')].map(r => r.dataset.name)")
    return names


def names_by(comparison: Comparison, key: str, reverse: bool = False) -> list[str]:
    return [
        result.name for result in sorted(comparison.results, key=lambda s: getattr(s.metrics, key), reverse=reverse)
    ]


def tip(browser: Browser) -> str:
    text: str = browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
    return text


def point(browser: Browser, canvas: str, x: float, y: float) -> str:
    """Move the pointer over a canvas, and read what it says."""
    place = browser.run(
        f"(() => {{ const c = document.getElementById('{canvas}'); c.scrollIntoView({{block: 'center'}}); "
        "const b = c.getBoundingClientRect(); return [b.left, b.top]; })()"
    )
    browser.move(place[0] + x, place[1] + y)
    return tip(browser)


def on_timeline(browser: Browser, rank: int, seconds: float, lane: float) -> str:
    """Point at a time of a rank's row; lane: 0 is its top, 1 its bottom."""
    has: dict[str, str] = browser.run("({...document.getElementById('timeline').dataset})")
    left, top, width, row, begin, end = (float(has[key]) for key in ("left", "top", "width", "row", "from", "to"))
    x = left + (seconds / TIME_UNIT - begin) / (end - begin) * width
    return point(browser, "timeline", x, top + (rank + lane) * row)


def test_the_table_opens_sorted_by_time_and_says_who_refused(browser: Browser, comparison: Comparison) -> None:
    assert rows(browser) == [result.name for result in comparison.results]
    first = browser.run("[...document.querySelector('#algorithms tbody tr').cells].map(c => c.textContent)")
    fastest = comparison.results[0].metrics
    assert first[1] == comparison.ms(fastest.seconds) and first[2] == f"{fastest.speedup:.2f}"
    refused = browser.run("document.getElementById('refused').innerText")
    assert "hybrid:ulysses_degree=4 cannot run this: ulysses_degree is 4; valid: a divisor of the 6 ranks" in refused
    assert "lengths of </script> & <b>" in browser.run("document.getElementById('problem').textContent")
    assert "modelled" in browser.run("document.querySelector('header').textContent")


def test_headings_sort_and_the_filter_narrows(browser: Browser, comparison: Comparison) -> None:
    browser.click("th[data-key='sent']")
    assert rows(browser) == names_by(comparison, "sent")
    assert browser.run("document.querySelector('th[data-key=sent]').getAttribute('aria-sort')") == "ascending"
    browser.click("th[data-key='sent']")
    assert rows(browser) == names_by(comparison, "sent", reverse=True)
    browser.click("th[data-key='fraction']")  # where large is good the largest is first
    assert rows(browser) == names_by(comparison, "fraction", reverse=True)
    browser.click("#filter")
    browser.type("IN")
    narrowed = rows(browser)
    why = {
        result.name: result.metrics.waiting_causes[0][0] if result.metrics.waiting_causes else "nothing"
        for result in comparison.results
    }
    assert set(narrowed) == {name for name in why if "in" in f"{name} {why[name]}"}
    browser.type("g, no such")
    assert rows(browser) == []


def test_a_click_shows_another_algorithm(browser: Browser, comparison: Comparison) -> None:
    shot = "document.getElementById('{}').toDataURL()"
    before = {name: browser.run(shot.format(name)) for name in ("timeline", "tiles")}
    slowest = comparison.results[-1]
    browser.click(f"tr[data-name='{slowest.name}']")
    assert browser.run("document.getElementById('name').textContent") == slowest.name
    assert browser.run("document.querySelector('tr.chosen').dataset.name") == slowest.name
    assert f"{slowest.metrics.speedup:.2f} times" in browser.run("document.getElementById('verdict').textContent")
    assert all(browser.run(shot.format(name)) != old for name, old in before.items())
    waiting_causes = browser.run("[...document.querySelectorAll('#causes li')].map(e => e.textContent)")
    assert len(waiting_causes) == len(slowest.metrics.waiting_causes)
    assert all(
        text.endswith(name) for text, (name, _) in zip(waiting_causes, slowest.metrics.waiting_causes, strict=True)
    )


def shown(browser: Browser, comparison: Comparison, name: str) -> AlgorithmResult:
    browser.click(f"tr[data-name='{name}']")
    result = comparison.named(name)
    assert result is not None
    return result


def test_pointing_at_bars_tells_tiles_waits_and_messages(browser: Browser, comparison: Comparison) -> None:
    timeline = shown(browser, comparison, "ring").timeline
    rank, step = 4, 2
    start, computed, end = timeline.steps_forward[rank, step]
    tiles = ComputedTiles(timeline.plan, "forward", [rank]).of(rank, step)
    said = on_timeline(browser, rank, (start + computed) / 2, 0.2)
    largest = tiles[0]
    assert f"rank {rank}, node 1: attention, forward step {step} (step {step - 1} of the plan)" in said
    assert f"{len(tiles)} tiles of {len(set(tiles['doc'].tolist()))} documents" in said
    assert f"{(tiles['pairs'] * tiles['heads']).sum():,} pairs" in said
    assert f"document {largest['doc']}: queries {largest['q_first']:,}–{largest['q_last']:,}" in said
    assert f"keys {largest['k_first']:,}–{largest['k_last']:,}" in said

    waited = timeline.steps_forward[:, :, 2] - timeline.steps_forward[:, :, 1]
    rank, step = map(int, np.unravel_index(waited.argmax(), waited.shape))
    assert waited[rank, step] > timeline.total / 100
    _, computed, end = timeline.steps_forward[rank, step]
    said = on_timeline(browser, rank, (computed + end) / 2, 0.2)
    assert f"rank {rank}, node {rank // 3}: waits for keys and values" in said
    of_rank = timeline.transfers_forward[
        (timeline.transfers_forward["src"] == rank) | (timeline.transfers_forward["dst"] == rank)
    ]
    last = of_rank[np.isclose(of_rank["end"], end)][0]
    assert f"last to arrive: {size_text(last['bytes'])} from rank {last['src']} to rank {last['dst']}" in said

    message = timeline.transfers_forward[
        (timeline.transfers_forward["dst"] == 3) & (timeline.transfers_forward["start"] == 1)
    ][0]
    said = on_timeline(browser, 3, (message["begin"] + message["end"]) / 2, 0.85)  # rank 2 is on the other node
    assert f"keys and values, {size_text(message['bytes'])} to rank 3" in said
    assert "from rank 2, between nodes" in said and "posted in forward step 1" in said
    assert "documents 3, 0, 2, 4 and 1 more" in said

    middle = (timeline.steps_forward[5, -1, 2] + timeline.steps_backward[5, 0, 0]) / 2
    said = on_timeline(browser, 5, middle, 0.2)
    assert "rank 5, node 1: linear layers" in said and f"{timeline.plan.layout.token_counts[5]:,} tokens" in said
    assert on_timeline(browser, 5, middle, 0.85) == ""  # nothing travels meanwhile


def test_the_wheel_zooms_the_timeline_and_a_button_shows_all_of_it(browser: Browser, comparison: Comparison) -> None:
    result = shown(browser, comparison, "ring")
    span = "(() => { const d = document.getElementById('timeline').dataset; return [Number(d.from), Number(d.to)]; })()"
    whole = browser.run(span)
    assert whole == [0, round(result.timeline.total / TIME_UNIT)]
    seconds = result.timeline.total / 4
    on_timeline(browser, 1, seconds, 0.2)
    place = browser.run(
        "(() => { const b = document.getElementById('timeline').getBoundingClientRect(); return [b.left + 400, b.top + 60]; })()"
    )
    for _ in range(3):
        browser.wheel(*place, -100)
    browser.wait_for(f"{span}[1] - {span}[0] < {0.55 * whole[1]}")
    near = browser.run(span)
    assert near[0] > 0 and near[1] - near[0] == pytest.approx(whole[1] * 0.8**3, rel=0.01)
    browser.click("#closer")
    assert browser.run(span)[1] - browser.run(span)[0] == pytest.approx((near[1] - near[0]) / 2, rel=0.01)
    browser.click("#whole")
    assert browser.run(span) == whole
    browser.click("#same")
    slowest = max(other.timeline.total for other in comparison.results)
    assert browser.run(span) == [0, round(slowest / TIME_UNIT)]


def test_documents_are_chosen_in_the_strip_and_their_tiles_pointed_at(browser: Browser, comparison: Comparison) -> None:
    plan = shown(browser, comparison, "ring").timeline.plan
    share = document_shares(plan, 2)[1]
    width = browser.run("document.getElementById('strip').clientWidth")
    assert "document 3: 5,200 tokens" in point(browser, "strip", width * 0.2, 20)
    assert point(browser, "strip", width * 0.7, 20).startswith(f"document {share.doc}: 3,000 tokens")
    place = browser.run(
        "(() => { const b = document.getElementById('strip').getBoundingClientRect(); "
        f"return [b.left + {width * 0.7}, b.top + 20]; }})()"
    )
    for what in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=what, x=place[0], y=place[1], button="left", clickCount=1)
    assert browser.run("document.body.dataset.document") == str(share.doc)
    assert browser.run("document.getElementById('document').textContent").endswith("computed by 6 ranks of 2 nodes")
    size = float(browser.run("document.getElementById('tiles').dataset.size"))
    borders = np.cumsum([0, *(count for _, count in share.queries)])
    for query, key in ((7, 2), (10, 0), (4, 4)):
        (q0, q1), (k0, k1) = borders[query : query + 2], borders[key : key + 2]
        x, y = (k0 * 0.7 + k1 * 0.3) / 3000 * size, (q0 * 0.3 + q1 * 0.7) / 3000 * size
        said = point(browser, "tiles", x, y)
        (rank,), (owner,) = share.queries[query][0], share.keys[key][0]
        assert f"document {share.doc}: queries {q0:,}–{q1 - 1:,} × keys {k0:,}–{k1 - 1:,}" in said
        assert f"computed by rank {rank} (node {rank // 3})" in said
        pairs = (q1 - q0) * (k1 - k0) if query > key else (q1 - q0) * (q1 - q0 + 1) // 2
        assert f"{pairs:,} pairs" in said
        held = size_text((k1 - k0) * 8 * (64 + 64) * 2)
        where = "between nodes" if rank // 3 != owner // 3 else "inside the node"
        there = f"keys and values are there: {held}"
        far = f"keys and values, {held}, are those of rank {owner} (node {owner // 3}), {where}"
        assert (there if rank == owner else far) in said
    assert point(browser, "tiles", size * 0.9, size * 0.1) == ""  # above the diagonal nothing is computed

    split = shown(browser, comparison, "ulysses")
    assert {len(ranks) for ranks, _ in document_shares(split.timeline.plan, 1)[0].queries} == {6}
    assert "computed by ranks 0–5, each for some of the heads" in point(browser, "tiles", size * 0.2, size * 0.6)
    assert browser.run("document.body.dataset.document") == str(share.doc)  # it stays when the algorithm changes


@pytest.mark.parametrize("reach", [(2**31, 0), (2**31, 2**31), (50, 0), (17, 9), (0, 0)])
def test_pairs_of_tiles_are_counted_under_every_mask(browser: Browser, reach: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    runs = random.integers(0, 120, (40, 4))
    cases = [(min(a, b), max(a, b) + 1, min(c, d), max(c, d) + 1) for a, b, c, d in runs.tolist()]
    counted = browser.run(
        f"(PROBLEM.reach = {list(reach)}, {json.dumps(cases)}.map(([a, b, c, d]) => "
        "pairs({from: a, to: b}, {from: c, to: d})))"
    )
    for (a, b, c, d), actual in zip(cases, counted, strict=True):
        q, k = np.arange(a, b)[:, None], np.arange(c, d)[None]
        assert actual == int(((k >= q - reach[0]) & (k <= q + reach[1])).sum()), (a, b, c, d)
