"""Second part of the proof: no row is received while it is read, sent or received once more; no gradient leaves while
it is still summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_cp.errors import PlanError
from mindspeed_cp.plan.program import Program
from mindspeed_cp.plan.records import Messages

Intervals = tuple[np.ndarray, np.ndarray]  # first and last-plus-one address of runs of rows


def check_lifetimes(program: Program, tiles: Sequence[np.ndarray], name: str) -> None:
    """Raise PlanError naming rank, step and slot of the first row that is used in two ways at once.

    All slots of all ranks are laid one behind the other, so that a row is one address and every conflict is an
    overlap of two intervals in some step.

    Args:
        program: the program, structurally sound.
        tiles: for every rank its tiles.
        name: "forward" or "backward".
    """
    space = _Addresses(program)
    fetches = space.of_messages(program.fetch)
    reduces = space.of_messages(program.reduce)
    reads = space.of_tiles(tiles)
    for step in range(program.steps):
        flying = _flying(fetches, step)
        received, sent = flying["dst"], flying["src"]
        read = _select(reads, reads["step"] == step)
        space.refuse_twice(received, name, step, "is received by two messages at once")
        space.refuse_overlap(received, sent, name, step, "is received while it is being sent")
        space.refuse_overlap(received, read, name, step, "is received while a tile reads it")

        leaving = _flying(reduces, step)["src"]
        landing = _select(reduces["dst"], reduces["done"] == step)
        space.refuse_overlap(leaving, read, name, step, "has its gradient sent while a tile still adds to it")
        space.refuse_overlap(leaving, landing, name, step, "has its gradient sent while another one is added to it")
        reset = _select(fetches["dst"], fetches["done"] == step)
        staying = _select(reduces["src"], (reduces["start"] <= step) & (step < reduces["done"]))
        space.refuse_overlap(staying, reset, name, step, "has its gradient sent while a landing fetch starts it anew")


class _Addresses:
    """Rows of all slots of all ranks, numbered one after the other."""

    def __init__(self, program: Program) -> None:
        self.slots = program.capacity.shape[1]
        self.base = np.concatenate([[0], np.cumsum(program.capacity.ravel())])

    def address(self, rank: np.ndarray | int, slot: np.ndarray, row: np.ndarray) -> np.ndarray:
        return self.base[rank * self.slots + slot] + row

    def of_messages(self, messages: Messages) -> dict:
        owner, runs = messages.flat_runs
        items = messages.items[owner]
        out = {"start": items["start"], "done": items["done"]}
        for side in ("src", "dst"):
            first = self.address(items[side], items[side + "_slot"], runs[side + "_row"])
            out[side] = first, first + runs["rows"]
        return out

    def of_tiles(self, tiles: Sequence[np.ndarray]) -> dict:
        """Rows read by tiles; tiles of a step are mostly neighbours, so runs that touch are joined by `_overlap`'s
        sort."""
        first = np.concatenate([self.address(rank, t["slot"], t["k_row"]) for rank, t in enumerate(tiles)])
        rows = np.concatenate([t["k_rows"] for t in tiles])
        return {"step": np.concatenate([t["step"] for t in tiles]), 0: first, 1: first + rows}

    def refuse_twice(self, runs: Intervals, name: str, step: int, why: str) -> None:
        order = np.argsort(runs[0], kind="stable")
        first, end = runs[0][order], np.maximum.accumulate(runs[1][order])
        twice = np.flatnonzero(first[1:] < end[:-1])
        if len(twice):
            self._refuse(int(first[twice[0] + 1]), name, step, why)

    def refuse_overlap(self, a: Intervals, b: Intervals, name: str, step: int, why: str) -> None:
        """a and b must have no row in common."""
        if not len(a[0]) or not len(b[0]):
            return
        starts, ends = np.sort(a[0]), np.sort(a[1])
        common = np.searchsorted(starts, b[1], "left") - np.searchsorted(ends, b[0], "right")
        hit = np.flatnonzero(common > 0)
        if len(hit):
            inside = (a[0] < b[1][hit[0]]) & (a[1] > b[0][hit[0]])
            self._refuse(int(max(b[0][hit[0]], a[0][inside].min())), name, step, why)

    def _refuse(self, address: int, name: str, step: int, why: str) -> None:
        place = int(np.searchsorted(self.base, address, "right")) - 1
        rank, slot = divmod(place, self.slots)
        raise PlanError(f"{name}: rank {rank}, step {step}: row {address - int(self.base[place])} of slot {slot} {why}")


def _flying(messages: dict, step: int) -> dict[str, Intervals]:
    now = (messages["start"] <= step) & (step <= messages["done"])
    return {side: _select(messages[side], now) for side in ("src", "dst")}


def _select(runs: dict | Intervals, keep: np.ndarray) -> Intervals:
    return runs[0][keep], runs[1][keep]
