"""`mindspeed-cp doctor` under torchrun: the checks of one machine on every rank, and the links and algorithms of all.

Ranks agree over torchrun's store and not over the links that are measured: each gives rank 0 a row of JSON, and rank 0
answers. So an error on any rank is a row of the report, and the others go on::

    rank 0     machine              | pair (0, 1)  pair (0, 2) ..  | algorithms
    rank 1     machine              | pair (0, 1)        -         |
               no message of ranks  | a group of two for each pair | a group of all, which needs every link

Rank 0 writes the report after every stage; a rank that dies ends the launch, and what was measured is in the file.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mindspeed_cp.algorithms import ALGORITHMS, build_plan
from mindspeed_cp.doctor import run_checks
from mindspeed_cp.doctor.findings import findings, is_ok, rank_tables
from mindspeed_cp.doctor.kernel_capability import write_json
from mindspeed_cp.doctor.links import NO_ANSWER, Launch, LinkTimer, error_text, first_error, join_process_group
from mindspeed_cp.doctor.machine import device_memory, device_name, rank_device
from mindspeed_cp.doctor.operator import (
    DTYPES,
    MAX_DIFFERENCE,
    ReferenceKey,
    reference_inputs,
    reference_results,
    relative_difference,
)
from mindspeed_cp.engine import context_parallel_attention
from mindspeed_cp.errors import ConfigError, PeerError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Plan, Topology
from mindspeed_cp.report.text import print_tables

FORMAT = 2
JOIN_SECONDS = 300.0  # until all ranks have reached the store
STAGE_SECONDS = 600.0  # of a stage without messages on one rank
MAX_REFERENCE_RANKS = 64  # the batch that is compared with fp64 grows with the ranks up to these
MAX_BROKEN_LINKS = 12  # after which no more are measured
MAX_NODE_ROUNDS = 7  # of pairs of nodes: all pairs of 8 nodes; of more nodes, each meets 7
ATTENTION = AttentionConfig(8, 8, 64)

#: Variables that libraries of communication and devices read.
PREFIXES = (
    "HCCL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "ASCEND_", "ACL", "OMP_", "MKL_", "CUDA_", "P2P_HCCL_", "RDMA_",
    "UCX_", "MALLOC_", "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF", "MULTI_STREAM_MEMORY_REUSE",
)  # fmt: skip


class Sizes(NamedTuple):
    """Type of the tensors, bytes of a timed message, and seconds until a silent link counts as hung."""

    dtype: str
    message_bytes: int
    link_seconds: float


#: Devices that are measured. HCCL itself waits 120 s for a connection.
DEFAULTS = {
    "cpu": Sizes("fp32", 8 << 20, 20.0),
    "npu": Sizes("bf16", 64 << 20, 150.0),
}


class StoreAgreement:
    """Rows of all ranks to rank 0, and its answer to all, over a store.

    Args:
        store: the store of the ranks.
        rank, ranks: number of this rank, and of all.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks, self._number = store, rank, ranks, 0

    def agree(self, row: dict[str, Any], decide: Callable[[list[dict[str, Any]]], Any], seconds: float) -> Any:
        """Give rank 0 a row, and return what it decides by the rows of all ranks.

        Args:
            row: JSON values.
            decide: called on rank 0 alone; returns a JSON value. A rank without an answer has {"error": text}.
            seconds: limit of rank 0's wait after its own row.

        Raises:
            PeerError: rank 0 has ended or gives no answer.
        """
        self._number += 1
        answer_key = f"answer/{self._number}"
        try:
            self.store.set(f"row/{self._number}/{self.rank}", json.dumps([row]))
            if self.rank:
                answer = self._wait(answer_key, time.monotonic() + 2 * seconds + JOIN_SECONDS)
                if answer is None:
                    raise PeerError(f"rank {self.rank}: rank 0 gives no answer")
                return answer[0]
            deadline, silent = time.monotonic() + seconds, [{"error": f"{NO_ANSWER} within {seconds:g} s"}]
            keys = [f"row/{self._number}/{rank}" for rank in range(self.ranks)]
            answer = decide([(self._wait(key, deadline) or silent)[0] for key in keys])
            self.store.set(answer_key, json.dumps([answer]))
            return answer
        except dist.DistNetworkError as error:
            raise PeerError(f"rank {self.rank}: the store of the ranks is gone, so rank 0 has ended") from error

    def _wait(self, key: str, deadline: float) -> Any:
        try:
            self.store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except dist.DistStoreError:
            return None
        return json.loads(self.store.get(key))


def check_ranks(launch: Launch, report: Path, kind: str, *, as_json: bool) -> int:
    """Take part in the check as one of the ranks that torchrun started.

    Args:
        launch: this rank.
        report: file that rank 0 writes.
        kind: a key of DEFAULTS.
        as_json: True to print the report as JSON.

    Returns:
        The exit code, on every rank: 0 if nothing failed and every result was right, else 1.

    Raises:
        ConfigError: the device is not measured over ranks, or the report cannot be written.
        PeerError: the store of the ranks is gone.
    """
    if kind not in DEFAULTS:
        raise ConfigError(
            f"--device {kind}: is not measured over all ranks; valid under torchrun: auto, {', '.join(DEFAULTS)}; in "
            "one process the doctor checks it"
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
    except (RuntimeError, ValueError) as error:
        place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"{place}: rank {launch.rank} reaches no store there ({' '.join(str(error).split())[:160]}); check that "
            "rank 0 has started and that no firewall is between"
        ) from None
    agreement = StoreAgreement(dist.PrefixStore("doctor", store), launch.rank, launch.ranks)
    check = RanksCheck(launch, agreement, report, kind)
    try:
        check.run(sys.stderr if as_json else sys.stdout)
    finally:
        with suppress(Exception):
            dist.destroy_process_group()
    if launch.rank == 0 and as_json:
        print(json.dumps(check.report))
    elif launch.rank == 0:
        print_tables(rank_tables(check.report))
        for level, text in findings(check.report):
            print(f"{level}: {text}")
        print(f"written: {report}, to attach to a question; it has names of hosts and values of variables")
    return int(agreement.agree({}, lambda _: 0 if is_ok(check.report) else 1, STAGE_SECONDS))


class RanksCheck:
    """The stages of a check on one rank; see :func:`check_ranks`.

    Attributes:
        report: on rank 0, what was measured, as JSON values.
    """

    def __init__(self, launch: Launch, agreement: StoreAgreement, path: Path, kind: str) -> None:
        self.launch, self.agreement, self._path, self._kind = launch, agreement, path, kind
        self._sizes = DEFAULTS[kind]
        self._timer: LinkTimer | None = None
        self.report: dict[str, Any] = {
            "format": FORMAT, "finished": False, "nodes": launch.nodes, "ranks_per_node": launch.ranks_per_node,
            "device": kind, **self._sizes._asdict(),
            "ranks": [], "links": [], "algorithms": [], "failures": [], "seconds": {},
        }  # fmt: skip

    def run(self, log: Any) -> None:
        """Run the stages; rank 0 writes the report before and a line to `log` after each.

        Raises:
            ConfigError: the report cannot be written.
        """
        stages = (self._machine, self._links, self._join, self._algorithms)
        for number, stage in enumerate(stages):
            name, start = stage.__name__.strip("_"), time.monotonic()
            self._write(name)
            goes_on = stage()
            self.report["seconds"][name] = time.monotonic() - start
            if self.launch.rank == 0:
                print(f"{name}: {self.report['seconds'][name]:.1f} s", file=log, flush=True)
            if not goes_on:
                rest = ", ".join(stage.__name__.strip("_") for stage in stages[number + 1 :])
                self._fail(name, f"not measured after this: {rest}" if rest else "not all was measured")
                break
        self.report["finished"] = True
        self._write(None)

    def _write(self, stage: str | None) -> None:
        if self.launch.rank == 0:
            write_json("--report", self._path, {**self.report, "running": stage})

    def _fail(self, stage: str, text: str) -> None:
        self.report["failures"].append({"stage": stage, "error": text})

    def _collect(
        self,
        stage: str,
        measure: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda rows: None,
        seconds: float = STAGE_SECONDS,
    ) -> bool:
        """Measure on this rank and give rank 0 the result, or the error, which becomes a failure of the report; return
        True if all ranks had a result. `decide` is called on rank 0, with the results."""

        def judge(rows: list[dict[str, Any]]) -> bool:
            error = first_error({rank: row["error"] for rank, row in enumerate(rows) if "error" in row})
            if error is None:
                decide([row["result"] for row in rows])
            else:
                self._fail(stage, error)
            return error is None

        return bool(self.agreement.agree(attempt(measure), judge, seconds))

    def _machine(self) -> bool:
        def measure() -> dict[str, Any]:
            device = rank_device(self._kind, self.launch.local_rank)
            environment = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)}
            own = {"host": platform.node(), "device": device_name(device), "memory": device_memory(device)}
            return {**own, "environment": environment, **run_checks(self._kind, self.launch.local_rank)}

        return self._collect("machine", measure, self.report["ranks"].extend)

    def _links(self) -> bool:
        """Measure pairs of ranks, each in a group of its own: a link that is broken spoils no other."""
        broken = 0
        for kind, pairs in link_slots(self.launch.nodes, self.launch.ranks_per_node):
            pair = next((pair for pair in pairs if self.launch.rank in pair), None)

            def judge(rows: list[dict[str, Any]], kind: str = kind, pairs: Sequence[Any] = pairs) -> int:
                errors = 0
                for first, second in pairs:
                    error = first_error({r: rows[r]["error"] for r in (first, second) if "error" in rows[r]})
                    errors += error is not None
                    if error is None:
                        self.report["links"].append({"kind": kind, "pair": [first, second], **rows[first]["result"]})
                    else:
                        self._fail("links", f"{first} - {second}: {error}")
                return errors

            row = {} if pair is None else attempt(partial(self._time_pair, pair))
            broken += int(self.agreement.agree(row, judge, 60.0 + 3 * self._sizes.link_seconds))
            if broken >= MAX_BROKEN_LINKS:
                break
        return broken == 0

    def _time_pair(self, pair: tuple[int, int]) -> dict[str, float]:
        store = dist.PrefixStore(f"pair {pair[0]} {pair[1]}", self.agreement.store)
        try:
            timer = self._join_group(store, pair.index(self.launch.rank), 2)
            return timer.time_pair(self._sizes.message_bytes)
        finally:
            with suppress(Exception):
                dist.destroy_process_group()

    def _join_group(self, store: dist.Store, rank: int, ranks: int) -> LinkTimer:
        device = rank_device(self._kind, self.launch.local_rank)
        join_process_group(device, self._sizes.link_seconds, store=store, rank=rank, world_size=ranks)
        return LinkTimer(device, self._sizes.link_seconds)

    def _join(self) -> bool:
        def measure() -> None:
            store = dist.PrefixStore("all", self.agreement.store)
            self._timer = self._join_group(store, self.launch.rank, self.launch.ranks)

        return self._collect("join", measure, seconds=60.0 + 3 * self._sizes.link_seconds)

    def _algorithms(self) -> bool:
        return all(map(self._algorithm, ALGORITHMS))

    def _algorithm(self, algorithm: str) -> bool:
        """Compare an algorithm; return False if a rank failed, after which the group is of no use."""
        topology = Topology(self.launch.nodes, self.launch.ranks_per_node)
        try:
            plan = build_plan(Documents(small_lengths(self.launch.ranks)), topology, ATTENTION, algorithm)
        except (ConfigError, PlanError) as error:  # on all ranks, which plan the same
            self.report["algorithms"].append({"algorithm": algorithm, "refused": str(error)})
            return True

        def judge(rows: list[str | None]) -> None:
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(rows) if text is not None]
            self.report["algorithms"].append({"algorithm": algorithm, "wrong": "; ".join(wrong[:3]) or None})

        return self._collect(f"algorithm {algorithm}", lambda: self._compare(plan), judge)

    def _compare(self, plan: Plan) -> str | None:
        """Run a plan forward and backward, and return how this rank's rows differ from dense attention in fp64.

        Every rank makes all inputs from the same seed, so that only the algorithm's own messages travel.
        """
        assert self._timer is not None
        key, rank = ReferenceKey(plan.documents, plan.documents, plan.attention), self.launch.rank
        own = (plan.layout.shard(x, rank) for x in reference_inputs(key))
        q, k, v, dout = (x.to(DTYPES[self._sizes.dtype]).to(self._timer.device) for x in own)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(q, k, v, plan, timeout=self._sizes.link_seconds)
        results = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        for name, result in zip(("out", "dq", "dk", "dv"), results, strict=True):
            reference, limit = plan.layout.shard(reference_results(key)[name], rank), MAX_DIFFERENCE[self._sizes.dtype]
            difference = relative_difference(result.cpu(), reference) if len(reference) else 0.0
            if not difference <= limit:
                return f"{name} differs from fp64 by {difference:.1e}, limit {limit:.0e}"
        return None


def small_lengths(ranks: int) -> list[int]:
    """Return the documents of the batch that is compared in full: cut ones, and one that is shorter than the ranks."""
    share = min(ranks, MAX_REFERENCE_RANKS)
    return [40 * share + 3, 17, 24 * share]


def attempt(measure: Callable[[], Any]) -> dict[str, Any]:
    """Return {"result": what a measurement returns} or {"error": its error}, whatever it is."""
    try:
        return {"result": measure()}
    except Exception as error:
        return {"error": error_text(error)}


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs of range(count) in which every pair occurs once (the circle method)."""
    players = list(range(count)) + [-1] * (count % 2)
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0]
        players = [players[0], players[-1], *players[1:-1]]


def link_slots(nodes: int, ranks_per_node: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield (kind, pairs of ranks whose links are measured at the same time).

    Inside nodes every pair of ranks is measured, one pair of each node at a time. Between nodes every rank is measured
    with the rank of its own local number on every other node, or on some of more than 8 nodes, one NIC of a node at a
    time; nodes meet in disjoint pairs.
    """
    for pairs in tournament(ranks_per_node):
        for a, b in pairs:
            bases = [node * ranks_per_node for node in range(nodes)]
            yield "in_node", [(base + a, base + b) for base in bases]
    for number, node_pairs in enumerate(tournament(nodes)):
        for local in range(ranks_per_node if number < MAX_NODE_ROUNDS else 0):
            yield "network", [(a * ranks_per_node + local, b * ranks_per_node + local) for a, b in node_pairs]
