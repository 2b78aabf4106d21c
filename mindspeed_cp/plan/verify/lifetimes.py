"""Lifetimes of rows: no row of a slot, and no gradient of one, is used in two ways at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

Intervals = tuple[np.ndarray, np.ndarray]  # first and last-plus-one address of runs of rows


def check_lifetimes(program: Program, tiles: Sequence[np.ndarray], direction: str) -> None:
    """Check that no row is used in two conflicting ways in one step.

    The slots of all ranks are concatenated into one address space, so that every conflict is an overlap of two
    intervals.

    Args:
        program: program that has passed `check_program`.
        tiles: tiles of each rank.
        direction: "forward" or "backward", for the message.

    Raises:
        PlanError: names rank, step, slot and row of the first conflict.
    """
    space = _Addresses(program)
    fetches = space.of_messages(program.fetch)
    reduces = space.of_messages(program.reduce)
    reads = space.of_tiles(tiles)
    for step in range(program.steps):
        fetched = _in_flight(fetches, step)
        received, sent = fetched["dst"], fetched["src"]
        read = _select(reads, reads["step"] == step)
        space.forbid_double(received, direction, step, "is received by two messages at once")
        space.forbid_overlap(received, sent, direction, step, "is received while it is being sent")
        space.forbid_overlap(received, read, direction, step, "is received while a tile reads it")

        leaving = _in_flight(reduces, step)["src"]
        landing = _select(reduces["dst"], reduces["done"] == step)
        space.forbid_overlap(leaving, read, direction, step, "has its gradient sent while a tile still adds to it")
        space.forbid_overlap(
            leaving, landing, direction, step, "has its gradient sent while another gradient is added to it"
        )
        reset = _select(fetches["dst"], fetches["done"] == step)
        staying = _select(reduces["src"], (reduces["start"] <= step) & (step < reduces["done"]))
        space.forbid_overlap(
            staying, reset, direction, step, "has its gradient sent while a fetch that lands sets it to zero"
        )


class _Addresses:
    """Addresses of the rows of all slots of all ranks."""

    def __init__(self, program: Program) -> None:
        self.slots = program.capacity.shape[1]
        self.base = np.concatenate([[0], np.cumsum(program.capacity.ravel())])

    def address(self, rank: np.ndarray | int, slot: np.ndarray, row: np.ndarray) -> np.ndarray:
        return self.base[rank * self.slots + slot] + row

    def of_messages(self, messages: Messages) -> dict:
        """Return the runs of messages at both ends, with their start and done steps."""
        owner, runs = messages.flat_runs
        items = messages.items[owner]
        out = {"start": items["start"], "done": items["done"]}
        for side in ("src", "dst"):
            first = self.address(items[side], items[side + "_slot"], runs[side + "_row"])
            out[side] = first, first + runs["rows"]
        return out

    def of_tiles(self, tiles: Sequence[np.ndarray]) -> dict:
        """Return the runs of rows that tiles read, with their steps."""
        first = np.concatenate([self.address(rank, tile["slot"], tile["k_row"]) for rank, tile in enumerate(tiles)])
        rows = np.concatenate([tile["k_rows"] for tile in tiles])
        return {"step": np.concatenate([tile["step"] for tile in tiles]), 0: first, 1: first + rows}

    def forbid_double(self, runs: Intervals, direction: str, step: int, why: str) -> None:
        """Raise PlanError if two of the runs overlap."""
        order = np.argsort(runs[0], kind="stable")
        first, end = runs[0][order], np.maximum.accumulate(runs[1][order])
        overlap = np.flatnonzero(first[1:] < end[:-1])
        if len(overlap):
            self._raise(int(first[overlap[0] + 1]), direction, step, why)

    def forbid_overlap(self, a: Intervals, b: Intervals, direction: str, step: int, why: str) -> None:
        """Raise PlanError if a and b have a row in common."""
        if not len(a[0]) or not len(b[0]):
            return
        starts, ends = np.sort(a[0]), np.sort(a[1])
        common = np.searchsorted(starts, b[1], "left") - np.searchsorted(ends, b[0], "right")
        hit = np.flatnonzero(common > 0)
        if len(hit):
            inside = (a[0] < b[1][hit[0]]) & (a[1] > b[0][hit[0]])
            self._raise(int(max(b[0][hit[0]], a[0][inside].min())), direction, step, why)

    def _raise(self, address: int, direction: str, step: int, why: str) -> None:
        index = int(np.searchsorted(self.base, address, "right")) - 1
        rank, slot = divmod(index, self.slots)
        row = address - int(self.base[index])
        raise PlanError(f"{direction}: rank {rank}, step {step}: row {row} of slot {slot} {why}")


def _in_flight(messages: dict, step: int) -> dict[str, Intervals]:
    now = (messages["start"] <= step) & (step <= messages["done"])
    return {side: _select(messages[side], now) for side in ("src", "dst")}


def _select(runs: dict | Intervals, keep: np.ndarray) -> Intervals:
    return runs[0][keep], runs[1][keep]
