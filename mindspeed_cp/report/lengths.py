"""Document lengths of a data set, and what context parallelism would gain on them: tables, JSON, a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_cp.choose.compare import AlgorithmResult, Comparison
from mindspeed_cp.report.files import new_figure
from mindspeed_cp.report.text import Table, format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Placed by cost, and the algorithms of other suites that it is compared with.
PLACED, OTHERS = "hierarchical", ("ring", "ulysses", "hybrid")

PERCENTILES = (50, 90, 99, 99.9)
LEAST_BIN = 256  # tokens; shorter documents share a bin
WORTH, NOT_WORTH = 1.2, 1.05  # docs/start.md has the same answers
_BAR = 24  # characters
_COLOURS = {"documents": "#a9bfd9", "tokens": "#4c7fc4", "attention": "#27497c"}
_RATIO_COLOURS = ("#e0483e", "#e6a323", "#8d55b8")


@dataclass(frozen=True, eq=False)
class LengthReport:
    """Lengths, and modelled layers of rows drawn from them.

    Attributes:
        source: where the lengths come from.
        lengths: int64 [documents], all at least 1.
        sampled: the lengths are drawn from a distribution.
        context: tokens of a row; longer documents are cut.
        comparisons: number of context-parallel ranks -> simulated algorithms, among them hierarchical.
    """

    source: str
    lengths: np.ndarray
    sampled: bool
    context: int
    comparisons: Mapping[int, Comparison]

    def bins(self) -> list[tuple[int, int, float, float, float]]:
        """Return bins of powers of two: least and most tokens, and their share of documents, of tokens and of a causal
        mask's pairs (the work of attention), with documents cut to the context."""
        cut = np.minimum(self.lengths, self.context)
        number = np.maximum(np.ceil(np.log2(np.maximum(cut, 1) / LEAST_BIN)).astype(np.int64), 0)
        sums = [np.bincount(number, weights) for weights in (np.ones(len(cut)), cut, cut * (cut + 1) / 2)]
        shares = np.stack([values / values.sum() for values in sums])
        edges = [0, *(LEAST_BIN << i for i in range(shares.shape[1]))]
        return [(edges[i] + 1, edges[i + 1], *shares[:, i].tolist()) for i in range(shares.shape[1])]

    def ratios(self, ranks: int) -> dict[str, float]:
        """Return how many times as fast hierarchical placement is as each other algorithm that can run."""
        return {name: values[0] for name, values in self.spread(ranks).items()}

    def spread(self, ranks: int) -> dict[str, tuple[float, float, float]]:
        """Return the same over all rows, and the least and the most of a row."""
        metrics = {result.candidate.algorithm: result.metrics for result in self.comparisons[ranks].results}
        placed, out = metrics[PLACED], {}
        for name in OTHERS:
            if name in metrics:
                by_row = np.array(metrics[name].batch_seconds) / np.array(placed.batch_seconds)
                out[name] = metrics[name].seconds / placed.seconds, float(by_row.min()), float(by_row.max())
        return out

    def tables(self) -> list[Table]:
        """Return the numbers, the histogram and the gains."""
        total = int(self.lengths.sum())
        percentiles = ", ".join(
            f"{p:g} %: {int(n):,}" for p, n in zip(PERCENTILES, np.percentile(self.lengths, PERCENTILES), strict=True)
        )
        drawn = f"{len(self.lengths):,} drawn" if self.sampled else f"{len(self.lengths):,}"
        longer = int((self.lengths > self.context).sum())
        numbers = (
            ("lengths", self.source),
            ("documents", f"{drawn}; {longer:,} longer than the context of {self.context:,}, which are cut"),
            ("tokens", f"{format_count(total)}; mean {total / len(self.lengths):,.0f}, longest {self.lengths.max():,}"),
            ("shorter than", percentiles),
        )
        rows = [
            (f"{first:,} - {last:,}", *(f"{100 * share:.1f} %" for share in shares), "#" * round(_BAR * shares[1]))
            for first, last, *shares in self.bins()
        ]
        columns = "tokens of a document", "of documents", "of tokens", "of attention", "tokens of the bin"
        gains = []
        for ranks, comparison in self.comparisons.items():
            topology, spread = comparison.case.topology, self.spread(ranks)
            seconds = self._placed(comparison).metrics.seconds
            cells = [_range(spread[name]) if name in spread else "cannot run" for name in OTHERS]
            gains.append((f"{ranks}", f"{topology.nodes} x {topology.ranks_per_node}", comparison.ms(seconds), *cells))
        case = next(iter(self.comparisons.values())).case
        rows_of = f"{len(case.batches)} drawn rows of {self.context:,} tokens"
        title = f"{rows_of} on cluster {case.cluster.name}: one layer, modelled (least - most of a row)"
        headings = "ranks", "nodes", f"{PLACED}, ms", *(f"x {name}" for name in OTHERS)
        return [
            Table("Lengths", ("", ""), numbers),
            Table("Histogram", columns, tuple(rows)),
            Table(title, headings, tuple(gains)),
        ]

    def sentence(self) -> str:
        """Return what context parallelism would gain."""
        ranks = max(self.comparisons)
        ratios = self.ratios(ranks)
        nearest = min(ratios, key=lambda name: ratios[name])
        gain = ratios[nearest]
        answer = (
            "worth a try"
            if gain >= WORTH
            else f"{nearest} is as good"
            if gain < NOT_WORTH
            else "a few assumed constants decide: calibrate"
        )
        ring = f"{ratios['ring']:.2f} times as fast as the even ring and " if nearest != "ring" else ""
        few = min(self.comparisons)
        first, last = (self._placed(self.comparisons[number]) for number in (few, ranks))
        _, least, most = self.spread(ranks)[nearest]
        rows = len(last.metrics.batch_seconds)
        spread = f" ({least:.2f} to {most:.2f} in {rows} rows)" if rows > 1 else ""
        return (
            f"On {ranks} ranks a row takes {self.comparisons[ranks].ms(last.metrics.seconds)} ms, "
            f"{first.metrics.seconds / last.metrics.seconds:.1f} times as fast as on {few}, and documents placed by "
            f"cost are {ring}{gain:.2f} times{spread} as fast as {nearest}, the fastest of {', '.join(OTHERS)} "
            f"(modelled): {answer}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; times are modelled, in seconds."""
        return {
            "modelled": True,
            "lengths": self.source,
            "sampled": self.sampled,
            "documents": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "longest": int(self.lengths.max()),
            "percentiles": {f"{p:g}": float(np.percentile(self.lengths, p)) for p in PERCENTILES},
            "context": self.context,
            "bins": [
                {"first": first, "last": last, "documents": docs, "tokens": tokens, "attention": attention}
                for first, last, docs, tokens, attention in self.bins()
            ],
            "ranks": [
                {
                    "ranks": ranks,
                    "seconds": {result.candidate.algorithm: result.metrics.seconds for result in comparison.results},
                    "times_as_fast_as": self.ratios(ranks),
                    "least_and_most_of_a_row": {name: values[1:] for name, values in self.spread(ranks).items()},
                }
                for ranks, comparison in self.comparisons.items()
            ],
            "conclusion": self.sentence(),
        }

    def figure(self) -> Figure:
        """Return the picture: the histogram, below it the gains.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        figure = new_figure(9, 7, 155, layout="constrained")
        top, bottom = figure.subplots(2, 1)
        bins = self.bins()
        places = np.arange(len(bins))
        for i, (name, colour) in enumerate(_COLOURS.items()):
            top.bar(places + 0.27 * (i - 1), [100 * row[2 + i] for row in bins], 0.27, label=f"of {name}", color=colour)
        top.set_xticks(places, [f"<= {format_count(row[1])}" for row in bins], rotation=30, ha="right")
        top.set(ylabel="%", title=f"{format_count(len(self.lengths))} documents by their tokens")
        top.legend(frameon=False)
        shown = list(self.comparisons)
        places = np.arange(len(shown))
        for i, (name, colour) in enumerate(zip(OTHERS, _RATIO_COLOURS, strict=True)):
            spread = [self.spread(ranks).get(name, (0.0, 0.0, 0.0)) for ranks in shown]
            heights = [mean for mean, _, _ in spread]
            beyond = np.array([(mean - least, most - mean) for mean, least, most in spread]).T
            whiskers = {"yerr": beyond.clip(0), "error_kw": {"ecolor": "0.3", "elinewidth": 1, "capsize": 2}}
            bars = bottom.bar(places + 0.27 * (i - 1), heights, 0.27, label=f"over {name}", color=colour, **whiskers)
            bottom.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=9)
        bottom.axhline(1.0, color="0.4", linewidth=1)
        bottom.set_xticks(places, [f"{ranks} ranks" for ranks in shown])
        title = f"Speed of {PLACED} on rows of {self.context:,} tokens, modelled; lines: least and most of a row"
        bottom.set(ylabel="times", title=title)
        bottom.margins(y=0.15)
        bottom.legend(frameon=False)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    @staticmethod
    def _placed(comparison: Comparison) -> AlgorithmResult:
        return next(result for result in comparison.results if result.candidate.algorithm == PLACED)


def _range(spread: tuple[float, float, float]) -> str:
    mean, least, most = spread
    return f"{mean:.2f} ({least:.2f} - {most:.2f})"
