"""The agreement of all ranks on the stages of a check, over a store.

Rank 0 posts a stage; every supervisor lets its worker run it and puts the outcome into the store. What travels is JSON:
a store asks nobody for a password, and what it holds must not run code. After a failure all workers are ended and start
again with the next stage, in a process group of its own; the items after the failed one still run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_cp.cluster_check.worker import Item, Outcome, Row, Worker

if TYPE_CHECKING:
    import torch.distributed as dist

#: Measurements by name: module and function of each.
Measurements = Mapping[str, tuple[str, str]]

POLL_SECONDS = 0.1
MAX_FAILURES = 4  # of a stage; then what is left of its items is not measured
GOODBYE_SECONDS = 10.0
SIGN_SECONDS = 1.0  # between two signs of a supervisor
LOST_SECONDS, JOIN_SECONDS = 60.0, 300.0  # without a sign of a rank, and until its first one


@dataclass(frozen=True)
class Failure:
    """An item that failed.

    Attributes:
        stage: name of the measurement.
        item: the item; None if the stage could not run.
        errors: message by rank, those of the causes first.
    """

    stage: str
    item: dict[str, Any] | None
    errors: dict[int, str]

    @property
    def first_error(self) -> str:
        """The message of the first rank, with its number."""
        rank, text = next(iter(self.errors.items()))
        name = f"rank {rank}: "
        return text if text.startswith(name) else name + text


@dataclass
class StageResult:
    """Rows of a stage and its failures.

    Attributes:
        rows: for each item, the row of each rank that finished it, by rank.
        failures: what failed.
        seconds: duration.
    """

    rows: list[dict[int, Row]]
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0


class Supervisor:
    """The part that is alike on all ranks.

    Args:
        rank, ranks: number of this rank, and of all ranks.
        store: the agreement.
        measurements: what may be run.
        start_worker: called with the number of a generation of workers; starts one.
        silence: seconds without a sign after which a worker counts as hung.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store: dist.Store,
        measurements: Measurements,
        start_worker: Callable[[int], Worker],
        silence: float,
    ) -> None:
        self.rank, self.ranks, self.store, self.silence = rank, ranks, store, silence
        self._measurements, self._start_worker = measurements, start_worker
        self._worker: Worker | None = None
        self._generation = self._signs = 0
        self._signed = 0.0  # monotonic seconds

    def run(self, number: int, stage: Mapping[str, Any]) -> Outcome:
        """Let the worker run a stage; publish its signs, its failure and its outcome."""
        if self._worker is None or self._generation != stage["generation"]:
            self.end()
            self._generation = stage["generation"]
            self._worker = self._start_worker(self._generation)
        failed = f"failed/{number}"
        outcome = self._worker.run(
            self._measurements[stage["name"]], stage["items"], stage["first"], self.silence, self._sign,
            lambda: bool(self.store.check([failed])),
        )  # fmt: skip
        if outcome.error is not None:
            self.store.set(failed, str(self.rank))
        self.store.set(f"outcome/{number}/{self.rank}", json.dumps(asdict(outcome)))
        return outcome

    def _sign(self) -> None:
        """Tell rank 0, every now and then, that this supervisor is there, whatever its worker hangs in."""
        if time.monotonic() > self._signed + SIGN_SECONDS:
            self._signed = time.monotonic()
            self._signs += 1
            self.store.set(f"sign/{self.rank}", str(self._signs))

    def follow(self) -> int:
        """Run the stages that rank 0 posts until it ends the check; return the exit code.

        Raises:
            RuntimeError: the store is gone.
        """
        number = 0
        try:
            while True:
                key = f"stage/{number}"
                while not self.store.check([key]):
                    time.sleep(POLL_SECONDS)
                stage = json.loads(self.store.get(key))
                if "exit_code" in stage:
                    self.store.set(f"goodbye/{self.rank}", "")
                    return int(stage["exit_code"])
                self.run(number, stage)
                number += 1
        finally:
            self.end()

    def end(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class Coordinator:
    """Rank 0: posts stages, runs its own part, and collects the outcomes of all ranks.

    Attributes:
        lost: ranks whose supervisors gave no sign; stages no longer run without them.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._store = supervisor, supervisor.store
        self._number = self._generation = 0
        self._signs: dict[int, tuple[bytes, float]] = {}
        self.lost: list[int] = []

    def run(self, name: str, items: Sequence[Item], most_failures: int = MAX_FAILURES) -> StageResult:
        """Run a measurement on all ranks, item by item. After a failed item the others go on with the next one, and
        after so many of them what is left is not measured."""
        start = time.monotonic()
        result = StageResult([{} for _ in items])
        first = 0
        while first < len(items):
            if self.lost:
                text = f"rank {', '.join(map(str, self.lost))} gave no sign of life, so this was not measured"
                result.failures.append(Failure(name, None, {0: text}))
                break
            if len(result.failures) == most_failures:
                text = f"{most_failures} items failed; the {len(items) - first} after them were not measured"
                result.failures.append(Failure(name, None, {0: text}))
                break
            outcomes = self._run_once(name, items, first)
            for rank, outcome in outcomes.items():
                for number, row in outcome.rows.items():
                    result.rows[number][rank] = row
            failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
            if not failed:
                break
            self._generation += 1
            item = _failed_item(failed)
            result.failures.append(Failure(name, dict(items[item]), _errors(failed)))
            first = item + 1
        result.seconds = time.monotonic() - start
        return result

    def stop(self, exit_code: int) -> None:
        """End the check on all ranks, and wait a moment for them: this process may serve the store."""
        self._store.set(f"stage/{self._number}", json.dumps({"exit_code": exit_code}))
        self._supervisor.end()
        waited = [f"goodbye/{rank}" for rank in range(1, self._supervisor.ranks) if rank not in self.lost]
        wait_for_keys(self._store, waited, GOODBYE_SECONDS)

    def _run_once(self, name: str, items: Sequence[Item], first: int) -> dict[int, Outcome]:
        number = self._number
        self._number += 1
        stage = {"name": name, "items": list(items), "first": first, "generation": self._generation}
        self._store.set(f"stage/{number}", json.dumps(stage))
        outcomes = {0: self._supervisor.run(number, stage)}
        waiting = list(range(1, self._supervisor.ranks))
        for rank in waiting:
            self._signs[rank] = self._signs.get(rank, (b"", 0.0))[0], time.monotonic()
        while waiting:
            for rank in list(waiting):
                key = f"outcome/{number}/{rank}"
                if self._store.check([key]):
                    outcomes[rank] = _read_outcome(self._store.get(key))
                    waiting.remove(rank)
                elif self._is_lost(rank):
                    self.lost.append(rank)
                    waiting.remove(rank)
                    text = "is gone" if self._signs[rank][0] else "did not start"
                    outcomes[rank] = Outcome({}, first, f"{text}: no sign of life of its process", True)
                    self._store.set(f"failed/{number}", str(rank))
            time.sleep(POLL_SECONDS / 5 if waiting else 0.0)
        return dict(sorted(outcomes.items()))

    def _is_lost(self, rank: int) -> bool:
        """Return True if the supervisor of a rank has given no sign for too long."""
        key, (last, since) = f"sign/{rank}", self._signs[rank]
        sign = self._store.get(key) if self._store.check([key]) else b""
        if sign != last:
            self._signs[rank] = sign, time.monotonic()
            return False
        return time.monotonic() > since + (LOST_SECONDS if last else JOIN_SECONDS)


def _read_outcome(text: bytes) -> Outcome:
    values = json.loads(text)
    rows = {int(number): row for number, row in values.pop("rows").items()}
    return Outcome(rows, **values)


def _failed_item(failed: Mapping[int, Outcome]) -> int:
    """Return the number of the item that failed: ranks that fail first are at the earliest one."""
    causes = [outcome for outcome in failed.values() if outcome.is_cause] or list(failed.values())
    return min(outcome.failed_item for outcome in causes if outcome.failed_item is not None)


def _errors(failed: Mapping[int, Outcome]) -> dict[int, str]:
    """Return the messages of the causes by rank; of all ranks if none is a cause."""
    causes = {rank: outcome for rank, outcome in failed.items() if outcome.is_cause} or failed
    return {rank: str(outcome.error) for rank, outcome in causes.items()}


def wait_for_keys(store: dist.Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait until the store has all keys; return those that it lacks when the time is up."""
    deadline = time.monotonic() + seconds
    missing = list(keys)
    while missing and time.monotonic() < deadline:
        missing = [key for key in missing if not store.check([key])]
        time.sleep(POLL_SECONDS if missing else 0.0)
    return missing
