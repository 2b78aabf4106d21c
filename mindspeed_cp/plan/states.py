"""StatePlan: linear attention over all ranks, as segments, the affine maps that they are, and who sends which when.

Linear attention (gated delta nets, KDA, lightning, Mamba2) carries a state S along a document. Whatever a run of its
tokens does to the state is an affine map, wherever the run is cut::

    S_out = S_in M + H        first (M, H), then (M', H') is (M M', H M' + H')
    dS_in = dS_out M^T + R    R: gradient of S_in from the outputs of the run alone

A *segment* is a run of tokens of a document on a rank; a rank's neighbouring spans are one. `before` names the segment
whose S_out enters it: the one with the token before, in a tree the last tokens of its nearest ancestor that has any.
A state so goes to every continuation. The gradient dS_out of a segment is the sum of dS_in of those that it enters. A
document that is whole on a rank has one segment, which nothing enters and which enters nothing: it sends nothing.

A program computes S_in of each segment, or dS_out, on registers (map, state) of ranks. In each step a rank does this::

    send      messages of the step, from registers as they are at its beginning
    compute   operations of the step in their order, after its messages have arrived

Registers of the forward: s holds the map of segment s at its rank, (M, H); M is None where nothing enters the segment.
The backward finds the maps that the forward's registers had, and R of segment s in register `forward.registers` + s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Layout, Redistribution
from mindspeed_cp.plan.problem import FP32_MAX, Topology
from mindspeed_cp.plan.records import int64_record
from mindspeed_cp.schema.messages import short_repr
from mindspeed_cp.schema.numbers import check_count

#: Kinds of linear attention: whether they have a delta term, so that M is a matrix and not a factor of each head, and
#: whether each channel of k has a gate of its own.
KINDS = {"gated_delta": (True, False), "kda": (True, True), "lightning": (False, False), "mamba2": (False, False)}

STATE_BYTES = 4  # of a number of a state or map: they travel in fp32

#: Segment: tokens start .. stop-1 of document `doc` on rank `rank`; S_out of segment `before` enters it, -1: nothing.
SEGMENT = int64_record("rank doc start stop before")

#: What a message carries of a register.
STATE, MAP = 1, 2

#: Message: `parts` (STATE, MAP or both) of register `source` of rank `src` become register `target` of rank `dst`.
STATE_MESSAGE = int64_record("step src dst source target parts")

#: Operations on registers a, b and out of a rank. COMPOSE: out = first a, then b; its map is None if a's is. ADD: the
#: state of out += that of a. PULL: the state of out += the state of a times M^T of b. Nothing in `out` counts as 0.
COMPOSE, ADD, PULL = 0, 1, 2
STATE_OPERATION = int64_record("step rank kind a b out")


@dataclass(frozen=True)
class StateConfig:
    """Definition of the linear attention of one layer, on one tensor-parallel rank.

    ::

        gated_delta, kda     S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T     o_t = scale * S_t q_t
        lightning, mamba2    S_t = S_{t-1} a_t + b_t v_t k_t^T

    a = exp(gate) is a number for each head, in kda one for each channel of k; b is beta. S of a head is
    [head_dim_v, head_dim].

    Attributes:
        kind: "gated_delta" (Yang et al. 2412.06464), "kda" (Kimi Linear 2510.26692), "lightning" (2401.04658) or
            "mamba2" (2405.21060).
        heads: heads of v, of gates and of states.
        head_dim: channels of q and k of a head.
        head_dim_v: channels of v and of the output; default: head_dim.
        key_heads: heads of q and k; default: `heads`. Head h reads key head h // (heads / key_heads).
        scale: factor of the output; default: head_dim ** -0.5 with a delta term, else 1.

    Raises:
        ConfigError: a value is out of range.
    """

    kind: str
    heads: int
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # filled in: head_dim
    key_heads: int = None  # type: ignore[assignment]  # filled in: heads
    scale: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError(f"kind is {short_repr(self.kind)}; valid: {', '.join(KINDS)}")
        for name, default in (("head_dim_v", self.head_dim), ("key_heads", self.heads)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("heads", "head_dim", "head_dim_v", "key_heads"):
            check_count(f"state.{name}", getattr(self, name))
        for name in ("heads", "head_dim", "head_dim_v", "key_heads"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.heads % self.key_heads:
            raise ConfigError(
                f"state.key_heads is {self.key_heads}; valid: a divisor of state.heads, which is {self.heads}"
            )
        scale = self.scale
        if scale is not None and not (isinstance(scale, (int, float, np.number)) and 0 < scale <= FP32_MAX):
            raise ConfigError(f"state.scale is {short_repr(scale)}; valid: a finite number above 0, or None")

    @property
    def has_delta(self) -> bool:
        """True if M is a matrix; else it is a factor of each head."""
        return KINDS[self.kind][0]

    @property
    def has_channel_gates(self) -> bool:
        """True if each channel of k has a gate of its own."""
        return KINDS[self.kind][1]

    @property
    def factor(self) -> float:
        """Factor of the output, with the default filled in."""
        return self.scale if self.scale is not None else self.head_dim**-0.5 if self.has_delta else 1.0

    def bytes_of(self, parts: np.ndarray | int, heads: np.ndarray | int | None = None) -> np.ndarray:
        """Return the bytes in which parts of a register travel, fp64, for all heads or for so many."""
        heads = self.heads if heads is None else heads
        size = self.head_dim**2 if self.has_delta else 1
        numbers = (np.bitwise_and(parts, STATE) > 0) * self.head_dim_v * self.head_dim
        return (numbers + (np.bitwise_and(parts, MAP) > 0) * size) * float(STATE_BYTES) * heads


@dataclass(frozen=True, eq=False)
class StateProgram:
    """One direction of a plan of states.

    Attributes:
        registers: number of registers of a rank; those that it does not use take nothing.
        messages: records of dtype STATE_MESSAGE, sorted by step.
        operations: records of dtype STATE_OPERATION, sorted by step, within one in the order in which a rank runs them.
        results: register of each segment, at its rank, whose state is S_in, or in the backward dS_out; -1: it is 0;
            int64 [segments].
    """

    registers: int
    messages: np.ndarray
    operations: np.ndarray
    results: np.ndarray

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return 1 + max(int(table["step"].max(initial=-1)) for table in (self.messages, self.operations))


@dataclass(frozen=True, eq=False)
class StatePlan:
    """Everything that the states of one layer do with one packed batch, on all ranks, forward and backward.

    Plans compare and hash by identity, so derived data can be cached beside them.

    Attributes:
        schedule: "relay", "gather", "scan" or "heads".
        state: definition of the linear attention.
        topology: ranks and nodes.
        layout: rows of q, k, v, gate and beta that the caller passes, and of the output; all heads.
        compute_layout: rows and heads during the computation; equals `layout` except under "heads", where every rank
            has all tokens of a range of heads.
        segments: records of dtype SEGMENT, by rank and token.
        forward, backward: programs.
    """

    schedule: str
    state: StateConfig
    topology: Topology
    layout: Layout
    compute_layout: Layout
    segments: np.ndarray
    forward: StateProgram
    backward: StateProgram

    @property
    def algorithm(self) -> str:
        """Description for errors."""
        return f"{self.state.kind} by {self.schedule}"

    @property
    def documents(self) -> Documents:
        """Documents of the batch."""
        return self.layout.documents

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return self.layout.ranks

    @property
    def batch_layout(self) -> Layout:
        """Layout of the rows that the caller has, as in `Plan.batch_layout`."""
        return self.layout

    @cached_property
    def segment_offsets(self) -> np.ndarray:
        """Offsets of the ranks in `segments`, int64 [ranks + 1]."""
        return np.searchsorted(self.segments["rank"], np.arange(self.ranks + 1))

    @cached_property
    def carried(self) -> np.ndarray:
        """True for segments whose S_out enters another one; bool [segments]."""
        return enters_another(self.segments)

    @cached_property
    def borders(self) -> int:
        """Number of segments that a state of another rank enters."""
        before = self.segments["before"]
        entered = before >= 0
        return int((self.segments["rank"][before[entered]] != self.segments["rank"][entered]).sum())

    @cached_property
    def redistribution(self) -> Redistribution | None:
        """Move from `layout` to `compute_layout`, None if they are the same; its adjoint moves outputs back."""
        return Redistribution.between(self.layout, self.compute_layout, self.state.heads)

    def received_bytes(self, direction: str) -> np.ndarray:
        """Return the bytes of states and maps that each rank receives in a direction, fp64 [ranks]; under "heads" rows
        move instead (:func:`mindspeed_cp.simulate.states.state_transfers`)."""
        messages = getattr(self, direction).messages
        return np.bincount(messages["dst"], self.state.bytes_of(messages["parts"]), self.ranks)

    def __repr__(self) -> str:
        sent = len(self.forward.messages) + len(self.backward.messages)
        return (
            f"StatePlan({self.algorithm}, {self.ranks} ranks, {len(self.documents)} documents, "
            f"{len(self.segments)} segments, {self.borders} borders, {sent} states and maps sent)"
        )


def enters_another(segments: np.ndarray) -> np.ndarray:
    """Return True for segments that are `before` of another one; bool [segments]."""
    out = np.zeros(len(segments), bool)
    out[segments["before"][segments["before"] >= 0]] = True
    return out


def segments_of(layout: Layout) -> np.ndarray:
    """Return the segments of a layout, records of dtype SEGMENT by rank and token.

    Where ranks have ranges of heads and each has whole documents, each rank has the segments of all of them.
    """
    spans = layout.spans
    sides = (("rank", "rank"), ("doc", "doc"), ("start", "stop"))
    goes_on = [spans[name][1:] == spans[end][:-1] for name, end in sides]
    first = np.flatnonzero(np.append(True, ~np.logical_and.reduce(goes_on))[: len(spans)])
    out = np.empty(len(first), SEGMENT)
    for name in ("rank", "doc", "start"):
        out[name] = spans[name][first]
    out["stop"] = spans["stop"][np.append(first[1:], len(spans)) - 1] if len(first) else 0
    last = last_token_before(layout.documents, out["doc"], out["start"])
    # the segment with that token; under ranges of heads, on the same rank
    key = out["rank"] * layout.documents.tokens if layout.heads is not None else 0
    order = np.argsort(key + out["start"], kind="stable")
    index = np.searchsorted((key + out["start"])[order], key + last, "right") - 1
    out["before"] = np.where(last >= 0, order[index], -1)
    return out


def last_token_before(documents: Documents, doc: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the token whose state enters each of some tokens `start` of documents `doc`, -1: none; int64.

    It is the token before, or before the first of a document the last token of its nearest ancestor that has tokens.
    """
    first = documents.offsets[doc]
    parents = documents.trees.parents if documents.trees is not None else np.full(len(documents), -1)
    above = np.where(start > first, -1, parents[doc])
    while (empty := (above >= 0) & (documents.lengths[above] == 0)).any():
        above = np.where(empty, parents[above], above)
    inherited = np.where(above >= 0, documents.offsets[above + 1] - 1, -1)
    return np.where(start > first, start - 1, inherited)


def depths_of(segments: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sum of `counts` over what comes before each segment, its own included; int64 [segments]."""
    total, above = counts.copy(), segments["before"].copy()
    while (left := above >= 0).any():
        total[left] += counts[above[left]]
        above = np.where(left, segments["before"][above], -1)
    return total
