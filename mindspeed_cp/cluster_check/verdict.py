"""What the figures of a check say: sentences about what is slow, wrong or failed, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median, median_high
from typing import Any

from mindspeed_cp.cluster_check.results import CheckResults, rate_text

#: A device or link below these shares of the median of its kind is named.
SLOW_DEVICE, SLOW_LINK = 0.85, 0.7
#: A link whose directions hold each other up: each gets less than this share of what it gets alone.
HELD_UP = 0.7
#: Forwarding pays from this ratio of rates on.
WORTH_FORWARDING = 1.2
#: Less of a transfer than this is hidden behind kernels.
BADLY_HIDDEN = 0.6
#: The simulator's mean error above which its times do not fit this cluster.
BADLY_PREDICTED = 0.3

BAD, WARNING, GOOD = "bad", "warning", "good"


@dataclass(frozen=True)
class Finding:
    """A sentence about the cluster, and how bad it is: "bad", "warning" or "good"."""

    level: str
    text: str


def is_ok(results: CheckResults) -> bool:
    """Return True if nothing failed and every result was right. Slow links and devices are no failure."""
    return not results.failures and not any(row.get("wrong") for row in results.algorithms)


def verdict_lines(results: CheckResults) -> Iterator[str]:
    """Yield the findings as lines for a terminal."""
    words = {BAD: "FAILED", WARNING: "note", GOOD: "ok"}
    for finding in findings(results):
        yield f"{words[finding.level]}: {finding.text}"


def findings(results: CheckResults) -> list[Finding]:
    """Return all findings, the worst first."""
    rows = [
        *_failures(results), *_results(results), *_ranks(results), *_kernels(results), *_links(results),
        *_together(results), *_forwarding(results), *_overlap(results), *_simulator(results),
    ]  # fmt: skip
    order = (BAD, WARNING, GOOD)
    return sorted(rows, key=lambda finding: order.index(finding.level))


def _failures(results: CheckResults) -> Iterator[Finding]:
    for failure in results.failures:
        item = describe_item(failure.item)
        yield Finding(BAD, f"{failure.stage}{f' ({item})' if item else ''}: {failure.first_error}")

    if results.skipped:
        yield Finding(BAD, f"not measured, since the ranks form no group: {'; '.join(results.skipped)}")


def describe_item(item: dict[str, Any] | None) -> str:
    """Return what an item of a stage measures, in a few words."""
    if item is None:
        return ""
    if "pairs" in item:
        return ", ".join(f"{a} - {b}" for a, b in item["pairs"])
    if "algorithm" in item:
        return f"{item['algorithm']}, {item['batch']}"
    if "source" in item:
        return f"{item['source']} to {item['target']}{', forwarded' if item['forwarded'] else ''}"
    return str(item.get("kind", "")).replace("_", " ")


def _results(results: CheckResults) -> Iterator[Finding]:
    compared = [row for row in results.algorithms if "measured" in row]
    wrong = [row for row in compared if row["wrong"] is not None]
    for row in wrong:
        yield Finding(BAD, f"{row['algorithm']} on {row['batch']}: {row['wrong']}")
    if compared and not wrong:
        queries = sum(row["queries"] for row in compared)
        yield Finding(
            GOOD, f"all {len(compared)} runs of algorithms agree with the fp64 reference ({queries} sampled queries)"
        )


def _ranks(results: CheckResults) -> Iterator[Finding]:
    facts = [row for row in results.ranks if row is not None]
    for rank, row in enumerate(results.ranks):
        for text in row["refused"] if row is not None else ():
            yield Finding(BAD, f"rank {rank}: {text}")
    for name in facts[0]["versions"] if facts else ():
        versions = {str(row["versions"].get(name)) for row in facts}
        if len(versions) > 1:
            yield Finding(WARNING, f"ranks have different versions of {name}: {', '.join(sorted(versions))}")
    names = sorted({name for row in facts for name in row["environment"]})
    for name in names:
        values = {row["environment"].get(name, "not set") for row in facts}
        if len(values) > 1:
            yield Finding(WARNING, f"ranks have different values of {name}: {', '.join(sorted(values))}")
    if len(facts) == results.size:
        hosts: dict[int, set[str]] = {}
        for row in facts:
            hosts.setdefault(row["node"], set()).add(row["host"])
        split = [node for node, names_of_node in hosts.items() if len(names_of_node) > 1]
        if split:
            yield Finding(WARNING, f"ranks of node {', '.join(map(str, split))} run on several machines")
        if len(hosts) > 1 and len({name for names_of_node in hosts.values() for name in names_of_node}) == 1:
            yield Finding(WARNING, "all nodes are one machine: an emulated cluster, or a wrong --nproc-per-node")


def attention_rate(measurements: Sequence[dict[str, Any]], kind: str) -> float:
    """Return the highest rate of a rank's kernels of a kind, in FLOP/s."""
    return max((row["flops"] / row["seconds"] for row in measurements if row["kind"] == kind), default=0.0)


def _kernels(results: CheckResults) -> Iterator[Finding]:
    for kind, name in (("attention", "attention"), ("linear", "matrix products")):
        rates = {rank: attention_rate(rows, kind) for rank, rows in results.kernels.items()}
        if not rates:
            continue
        middle = median(rates.values())
        slow = [rank for rank, rate in rates.items() if rate < SLOW_DEVICE * middle]
        for rank in slow:
            yield Finding(
                WARNING, f"rank {rank} computes {name} at {rates[rank] / middle:.0%} of the median of all ranks"
            )
        if not slow:
            yield Finding(GOOD, f"{name}: all ranks within {1 - min(rates.values()) / middle:.0%} of the median")


def _links(results: CheckResults) -> Iterator[Finding]:
    for kind, name in (("in_node", "inside nodes"), ("network", "between nodes")):
        rows = [row for row in results.links if row["kind"] == kind]
        rates = [(row[way], row["pair"] if way == "there" else row["pair"][::-1]) for row in rows for way in WAYS]
        if not rates:
            continue
        middle = median_high(rate for rate, _ in rates)
        slow = [(rate, pair) for rate, pair in sorted(rates) if rate < SLOW_LINK * middle]
        for rank, number in _common_ends(slow, rates):
            yield Finding(
                WARNING, f"links {name}: {number} of the slow directions begin or end at rank {rank}: look at its NIC "
                "or port",
            )  # fmt: skip
        for rate, (source, target) in slow[:8]:
            yield Finding(
                WARNING, f"link {source} to {target} ({name}) carries {rate_text(rate)}, {rate / middle:.0%} of "
                "the median",
            )  # fmt: skip
        if len(slow) > 8:
            yield Finding(WARNING, f"links {name}: {len(slow) - 8} more directions are slow")
        if not slow:
            yield Finding(GOOD, f"links {name}: {rate_text(middle)} in the median, none below {SLOW_LINK:.0%} of that")
        held = [row["pair"] for row in rows if row["both"] < HELD_UP * min(row["there"], row["back"])]
        if held:
            pairs = ", ".join(f"{a} - {b}" for a, b in held[:6])
            yield Finding(
                WARNING, f"{len(held)} of {len(rows)} links {name} are slower when both directions are in use: {pairs}"
            )


WAYS = ("there", "back")


def _common_ends(slow: list[tuple[float, Any]], rates: list[tuple[float, Any]]) -> Iterator[tuple[int, int]]:
    """Yield (rank, slow directions) for ranks of which most directions are slow, if a rank has several."""
    for rank in sorted({rank for _, pair in slow for rank in pair}):
        number = sum(rank in pair for _, pair in slow)
        total = sum(rank in pair for _, pair in rates)
        if number >= 3 and number > total / 2:
            yield rank, number


def alone_rates(results: CheckResults) -> dict[int, float]:
    """Return the rate at which each rank sends to its like on the next node while all other ranks are silent; only for
    pairs of nodes that were measured."""
    per_node, out = results.ranks_per_node, {}
    for row in results.links:
        if row["kind"] != "network":
            continue
        first, second = row["pair"]
        if (first + per_node) % results.size == second:
            out[first] = row["there"]
        if (second + per_node) % results.size == first:
            out[second] = row["back"]
    return out


def _together(results: CheckResults) -> Iterator[Finding]:
    alone = alone_rates(results)
    rows = {row["rank"]: row["rate"] for row in results.together if row["kind"] == "network_all"}
    nodes: dict[int, list[int]] = {}
    for rank in rows:
        nodes.setdefault(rank // results.ranks_per_node, []).append(rank)
    for node, ranks in sorted(nodes.items()):
        if not all(rank in alone for rank in ranks):
            continue
        share = sum(rows[rank] for rank in ranks) / sum(alone[rank] for rank in ranks)
        level = WARNING if share < SLOW_LINK else GOOD
        yield Finding(
            level, f"node {node}: with all NICs at once {rate_text(sum(rows[r] for r in ranks))} leave it, "
            f"{share:.0%} of what its ranks reach alone",
        )  # fmt: skip


def _forwarding(results: CheckResults) -> Iterator[Finding]:
    rates = {row["forwarded"]: row["rate"] for row in results.forwarding}
    if len(rates) == 2:
        ratio = rates[True] / rates[False]
        worth = "" if ratio >= WORTH_FORWARDING else "; hierarchical gains nothing by it (routing: false)"
        yield Finding(
            GOOD if ratio >= WORTH_FORWARDING else WARNING,
            f"a message over all NICs of two nodes, forwarded inside them, is {ratio:.2f} times as fast as over one"
            + worth,
        )


def hidden_share(row: dict[str, Any], transfer: str) -> float:
    """Return the share of the shorter of kernels and transfer that the other one hides, from 0 to 1."""
    compute, alone, both = row["compute"], row[transfer], row[f"compute+{transfer}"]
    return max(0.0, min(1.0, (compute + alone - both) / max(min(compute, alone), 1e-12)))


def _overlap(results: CheckResults) -> Iterator[Finding]:
    shares = {row["rank"]: hidden_share(row, "exchange") for row in results.overlap}
    bad = {rank: share for rank, share in shares.items() if share < BADLY_HIDDEN}
    if bad:
        texts = ", ".join(f"rank {rank} {share:.0%}" for rank, share in sorted(bad.items(), key=lambda x: x[1])[:8])
        yield Finding(WARNING, f"messages hide badly behind kernels: {texts}")
    elif shares:
        yield Finding(GOOD, f"messages hide behind kernels: at least {min(shares.values()):.0%} on every rank")


def simulator_errors(results: CheckResults) -> list[float]:
    """Return |predicted / measured - 1| of every run that was measured and simulated."""
    return [
        abs(row["predicted"] / row["measured"] - 1)
        for row in results.algorithms
        if row.get("measured") and row.get("predicted")
    ]


def _simulator(results: CheckResults) -> Iterator[Finding]:
    errors = simulator_errors(results)
    if errors:
        level = WARNING if mean(errors) > BADLY_PREDICTED else GOOD
        yield Finding(
            level, f"simulated times after the fit are off by {mean(errors):.0%} in the mean, {max(errors):.0%} at "
            f"worst, over {len(errors)} runs",
        )  # fmt: skip
