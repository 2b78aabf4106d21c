"""The stages of a check on rank 0, in order; each adds to the results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.choose.compare import Comparison
from mindspeed_cp.cluster.cluster import Cluster
from mindspeed_cp.cluster_check.batches import BATCHES, check_memory, make_batches, needed_bytes
from mindspeed_cp.cluster_check.launch import Launch
from mindspeed_cp.cluster_check.link_slots import link_slots
from mindspeed_cp.cluster_check.prediction import fit_cluster, simulate_batch
from mindspeed_cp.cluster_check.request import DTYPES, ClusterRequest
from mindspeed_cp.cluster_check.results import CheckResults, layer_seconds, median_measurements, rows_by_rank
from mindspeed_cp.cluster_check.supervisor import MAX_FAILURES, Coordinator, Failure, StageResult
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan import Topology
from mindspeed_cp.report.files import replace_file

MESSAGE_SECONDS = 0.1  # of one message of a pair; some twenty messages of each pair are timed
KERNEL_SECONDS_OF_OVERLAP = 0.1
REPEATS, SAMPLES = 3, 4
LEAST_MESSAGE = 1 << 16
LEAST_TILE_ROWS = 1024  # the fit of attention needs tiles whose time grows with their FLOPs
ALONE = ("ranks", "links", "kernels", "all ranks")  # stages that need no group of all ranks
MAX_BROKEN_LINKS = 12  # slots with a failed link, after which no more are measured
FIT_SECONDS = 0.5  # of the largest message for the fit, which takes short ones into account as well
LARGEST_OF_FIT = 1 << 24


class ClusterDay:
    """The stages of one check.

    Args:
        request: arguments.
        launch: this rank, and the grid of ranks.
        coordinator: runs measurements on all ranks.
        results: gets what is measured.
        scratch: folder for the fitted cluster, at the same path on every node.

    Attributes:
        comparisons: simulation of each batch on the fitted cluster, by its name.
    """

    def __init__(
        self,
        request: ClusterRequest,
        launch: Launch,
        coordinator: Coordinator,
        results: CheckResults,
        scratch: Path,
    ) -> None:
        self._request, self._launch, self._coordinator, self._results = request, launch, coordinator, results
        self._scratch = scratch
        self._topology = Topology(launch.nodes, launch.ranks_per_node)
        self._is_apart = False
        self.comparisons: dict[str, Comparison] = {}

    def stages(self) -> Iterator[str]:
        """Run the stages; yield a line after each.

        Raises:
            ConfigError: the batches need more memory than there is; before anything long is measured.
        """
        results = self._results
        stages: list[tuple[str, Callable[[str], None]]] = [
            ("ranks", self._ranks),
            ("links", self._links),
            ("kernels", self._kernels),
            ("all ranks", self._join),
            ("links together", self._together),
            ("forwarding", self._forwarding),
            ("messages of many sizes", self._fit),
            ("overlap", self._overlap),
            *((f"algorithms, {batch}", partial(self._algorithms, batch)) for batch in BATCHES),
        ]
        for name, run in stages:
            if self._is_apart:
                results.skipped.append(name)
                continue
            before = len(results.failures)
            run(name)
            if name not in ALONE and len(results.failures) > before:
                self._join("all ranks")  # with new workers: if they cannot meet, the rest would only wait
            failed = len(results.failures) - before
            text = f"{name}: {results.seconds.get(name, 0.0):.1f} s"
            yield f"{text}, {failed} failed" if failed else text

    def _run(self, name: str, items: list[dict[str, Any]], most_failures: int = MAX_FAILURES) -> StageResult:
        """Run the measurement that a stage is named for, up to its comma."""
        return self._results.add(name, self._coordinator.run(name.partition(",")[0], items, most_failures))

    def _ranks(self, name: str) -> None:
        request, launch = self._request, self._launch
        result = self._run(name, [{"salt": secrets.token_hex(8)}])
        ranks = result.rows[0]
        self._results.ranks = [ranks.get(rank) for rank in range(launch.ranks)]
        self._results.batches = make_batches(launch.ranks * request.tokens, launch.ranks, request.seed)
        facts = [row for row in self._results.ranks if row is not None]
        if len(facts) < launch.ranks:
            return
        largest, needed = needed_bytes(
            self._results.batches, self._topology, request.attention, DTYPES[request.type_name]
        )
        check_memory(
            needed, largest, [row["free"] for row in facts], [row["memory_of"] for row in facts], request.tokens
        )

    def _links(self, name: str) -> None:
        slots = link_slots(self._launch.nodes, self._launch.ranks_per_node)
        most = self._request.defaults.message_bytes
        common = {"seconds": MESSAGE_SECONDS, "most": most}
        items = [{"kind": slot.kind, "pairs": slot.pairs, **common} for slot in slots]
        result = self._run(name, items, MAX_BROKEN_LINKS)
        self._results.links = [row for _, row in rows_by_rank(result)]

    def _join(self, name: str) -> None:
        """Form the group of all ranks; if that fails, nothing that needs it is tried."""
        self._is_apart = bool(self._run(name, [{}]).failures)

    def _message_bytes(self, kinds: tuple[str, ...], seconds: float, most: int | None = None) -> int:
        """Return the bytes that the slowest link of these kinds carries in so many seconds, within limits."""
        rates = [min(row["there"], row["back"]) for row in self._results.links if row["kind"] in kinds]
        size = int(min(rates, default=0.0) * seconds)
        return max(LEAST_MESSAGE, min(size, most or self._request.defaults.message_bytes))

    def _together(self, name: str) -> None:
        launch, items = self._launch, []
        if launch.ranks_per_node > 1:
            items.append({"kind": "in_node_all", "bytes": self._message_bytes(("in_node",), MESSAGE_SECONDS)})
        if launch.nodes > 1:
            items.append({"kind": "network_all", "bytes": self._message_bytes(("network",), MESSAGE_SECONDS)})
        self._results.together = [{"rank": rank, **row} for rank, row in rows_by_rank(self._run(name, items))]

    def _forwarding(self, name: str) -> None:
        launch = self._launch
        if launch.nodes < 2 or launch.ranks_per_node < 2:
            return
        size = self._message_bytes(("network",), 4 * MESSAGE_SECONDS)
        ends = {"source": 0, "target": launch.ranks_per_node, "bytes": size}
        items = [{**ends, "forwarded": forwarded} for forwarded in (False, True)]
        self._results.forwarding = [row for _, row in rows_by_rank(self._run(name, items))]

    def _kernel_item(self, seconds: float) -> dict[str, Any]:
        request, attention = self._request, self._request.attention
        longest = max(LEAST_TILE_ROWS, min(request.defaults.longest, request.tokens * self._launch.ranks))
        return {
            "heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim,
            "longest": longest, "hidden_size": request.defaults.hidden_size, "dtype": request.type_name,
            "seconds": seconds,
        }  # fmt: skip

    def _kernels(self, name: str) -> None:
        result = self._run(name, [self._kernel_item(self._request.kernel_seconds)])
        self._results.kernels = {rank: row["measurements"] for rank, row in rows_by_rank(result)}

    def _fit(self, name: str) -> None:
        """Measure messages of many sizes, and fit the cluster to them and to the kernels."""
        results = self._results
        kinds = sorted({row["kind"] for row in results.links})
        most = {kind: self._message_bytes((kind,), FIT_SECONDS, LARGEST_OF_FIT) for kind in kinds}
        measured = [row["measurements"] for _, row in rows_by_rank(self._run(name, [{"most": most}]))]
        if not measured or not results.kernels:
            results.failures.append(Failure("fit", None, {0: "kernels or links were not measured, see above"}))
            return
        rows = [*median_measurements(results.kernels), *measured[0]]
        memory = min(rank["memory"] for rank in results.ranks if rank is not None)
        title = f"Fitted by mindspeed-cp doctor --cluster, {self._request.type_name}"
        try:
            cluster, results.cluster = fit_cluster(rows, self._launch.ranks_per_node, memory, title)
        except ConfigError as error:
            hint = "; here: give a larger --tokens-per-rank" if str(error).startswith("attention") else ""
            text = f"{error}{hint}"
            results.failures.append(Failure("fit", None, {0: text}))
            return
        results.cluster["measurements"] = rows
        self._simulate(cluster)

    def _simulate(self, cluster: Cluster) -> None:
        """Simulate all algorithms on all batches."""
        assert self._results.cluster is not None
        self._scratch.mkdir(mode=0o700)
        path, text = self._scratch / "cluster.yaml", self._results.cluster["text"]
        replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))
        topology = Topology(self._launch.nodes, self._launch.ranks_per_node, str(path))
        element = DTYPES[self._request.type_name]
        for name, lengths in self._results.batches.items():
            try:
                self.comparisons[name] = simulate_batch(
                    lengths, topology, cluster, self._request.attention, element, name
                )
            except ConfigError as error:
                self._results.failures.append(Failure("simulation", {"batch": name}, {0: str(error)}))

    def _overlap(self, name: str) -> None:
        launch = self._launch
        kinds = ("network",) if launch.nodes > 1 else ("in_node",)
        item = self._kernel_item(KERNEL_SECONDS_OF_OVERLAP)
        item["longest"] = min(item["longest"], max(LEAST_TILE_ROWS, self._request.tokens))
        item["bytes"] = self._message_bytes(kinds, KERNEL_SECONDS_OF_OVERLAP)
        self._results.overlap = [{"rank": rank, **row} for rank, row in rows_by_rank(self._run(name, [item]))]

    def _algorithms(self, batch: str, name: str) -> None:
        results, request = self._results, self._request
        attention = request.attention
        common = {
            "heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim,
            "dtype": request.type_name, "seed": request.seed, "repeats": REPEATS, "samples": SAMPLES,
            "lengths": results.batches[batch], "scratch": str(self._scratch),
            "cluster": None if results.cluster is None else results.cluster["text"],
        }  # fmt: skip
        items = [{"batch": batch, "algorithm": algorithm, **common} for algorithm in ALGORITHMS]
        result = self._run(name, items)
        errors = {failure.item["algorithm"]: failure.first_error for failure in result.failures if failure.item}
        for failure in result.failures:
            for key in common:  # they are elsewhere in the results
                (failure.item or {}).pop(key, None)
        for item, rows in zip(items, result.rows, strict=True):
            results.algorithms.append(self._algorithm_row(item, rows, errors.get(item["algorithm"])))

    def _algorithm_row(
        self, item: dict[str, Any], rows: dict[int, dict[str, Any]], error: str | None
    ) -> dict[str, Any]:
        out: dict[str, Any] = {"batch": item["batch"], "algorithm": item["algorithm"], **self._predicted(item)}
        refused = [row["refused"] for row in rows.values() if "refused" in row]
        if refused:
            return {**out, "refused": refused[0]}
        if len(rows) < self._launch.ranks:
            return {**out, "error": error or "was not run, since others had failed"}
        wrong = [row["wrong"] for _, row in sorted(rows.items()) if row["wrong"] is not None]
        busy: dict[str, float] = {}
        for row in rows.values():
            for activity, seconds in row["busy"].items():
                busy[activity] = busy.get(activity, 0.0) + seconds / len(rows)
        return {
            **out, "measured": layer_seconds(rows), "busy": busy, "wrong": wrong[0] if wrong else None,
            "queries": sum(row["queries"] for row in rows.values()),
            "sent": [rows[rank]["sent"] for rank in sorted(rows)],
            "seconds": [rows[rank]["seconds"] for rank in sorted(rows)],
        }  # fmt: skip

    def _predicted(self, item: dict[str, Any]) -> dict[str, Any]:
        comparison = self.comparisons.get(item["batch"])
        entry = None if comparison is None else comparison.named(item["algorithm"])
        if entry is None:
            return {"predicted": None}
        metrics = entry.metrics
        return {
            "predicted": metrics.seconds, "predicted_attention": metrics.attention,
            "predicted_exposed": metrics.exposed, "predicted_sent": float(np.mean(entry.timeline.bytes_sent)),
        }  # fmt: skip
