"""What the simulator says of a step that was measured: the same plans, for the same documents, on a cluster's numbers.

A step is its micro-batches one after the other, a micro-batch its layers one after the other, and a layer is
:func:`mindspeed_cp.cost.simulate.simulate`: all ranks begin it together. The reduction of gradients comes last. What a
training step has beside these (embeddings, output layer, loss, optimizer, and all that the host does) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_cp.config import Settings
from mindspeed_cp.cost import Cluster, ComputeCost, LayerCost
from mindspeed_cp.cost.linear import linear_seconds
from mindspeed_cp.cost.simulate import fitted, simulate
from mindspeed_cp.cost.step import reduction_seconds
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Redistribution, in_shares
from mindspeed_cp.plan import AttentionConfig, Plan, build_plan, traffic
from mindspeed_cp.report.measured import Breakdown, MeasuredStep


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer, modelled: seconds, bytes and messages of each rank of a replica, fp64 [cp * tp], tensor-parallel ranks
    beside each other; and seconds of all of it."""

    attention: np.ndarray
    exposed: np.ndarray
    linear: np.ndarray
    sent: np.ndarray
    messages: np.ndarray
    seconds: float


def predict(step: MeasuredStep, cluster: Cluster) -> Breakdown:
    """The modelled breakdown of a step.

    Args:
        step: of which documents, layers and settings are taken.
        cluster: whose nodes have as many ranks as the run's, or more.

    Raises:
        ConfigError: the cluster's nodes have fewer ranks, or the plans cannot be built.
    """
    settings, about = step.settings, step.about
    cluster = fitted(cluster, settings.context_parallel_suite.topology.ranks_per_node)
    counts = {kind: step.layers.count(kind) for kind in dict.fromkeys(step.layers)}
    model = _Model(cluster, about["bytes_per_element"], settings, step.ranks[0].path)
    replicas, size = about["replicas"], settings.model_parallel_size
    sums = np.zeros((5, replicas, size))
    done = np.zeros(replicas)
    for replica in range(replicas):
        for micro in step.micro_batches(replica):
            for (attention, layer), count in counts.items():
                found = model.layer(*micro, attention, layer)
                parts = found.attention, found.exposed, found.linear, found.sent, found.messages
                sums[:, replica] += np.stack(parts) * count
                done[replica] += found.seconds * count
    total = done.max() + reduction_seconds(
        about["gradient_bytes"], cluster, replicas * settings.context_parallel_suite.context_parallel_size
    )
    attention_s, exposed, linear, sent, messages = sums.reshape(5, replicas * size)  # replicas are consecutive ranks
    waiting = total - attention_s - exposed - linear
    return Breakdown(attention_s, exposed, waiting, np.zeros(replicas * size), linear, sent, messages)


class _Model:
    """Layers on a cluster; those that come again are not simulated again.

    Args:
        cluster: of as many ranks a node as the plans'.
        element: bytes of an element of q, k, v and out.
        settings: of the run; they say what the backward computes again, and how tensor-parallel ranks share rows.
        path: of the trace, for errors.
    """

    def __init__(self, cluster: Cluster, element: int, settings: Settings, path: Path) -> None:
        self._cluster, self._element, self._settings, self._path = cluster, element, settings, path
        again, train = settings.model.recompute_granularity, settings.train
        self._again, self._linear_again = int(again is not None), int(again == "full")
        self._tp = train.tensor_model_parallel_size
        self._shares = self._tp if train.sequence_parallel else 1
        self._size = settings.model_parallel_size
        self._known: dict[tuple[Any, ...], _Layer] = {}

    def layer(
        self,
        documents: Documents,
        algorithm: str,
        options: dict[str, Any],
        attention: AttentionConfig,
        layer: LayerCost,
    ) -> _Layer:
        """One layer, forward, backward, and forward again where that is computed again."""
        key = documents, algorithm, tuple(options.items()), attention, layer
        if key not in self._known:
            topology = self._settings.context_parallel_suite.topology
            try:
                plan = build_plan(documents, topology, attention, algorithm, **options)
            except ConfigError as error:
                said = f"{self._path}: its plans cannot be made: {error}; remove it, and trace again"
                raise ConfigError(said) from None
            self._known[key] = self._simulated(plan, layer)
        return self._known[key]

    def _simulated(self, plan: Plan, layer: LayerCost) -> _Layer:
        said = traffic(plan, self._element)
        timeline = simulate(plan, self._cluster, layer)
        forward, own = timeline.forward, timeline.is_attention("forward")
        linear = linear_seconds(plan, ComputeCost(self._cluster, plan.attention, layer), backward=False)
        again, full, around = self._again, self._linear_again, timeline.edges - 1
        some = forward if full else forward[:, around : forward.shape[1] - around]  # attention alone, if not all
        kernels = (forward[:, own, 1] - forward[:, own, 0]).sum(1)
        exposed = (some[:, :, 2] - some[:, :, 1]).sum(1)
        once_more = float((some[:, -1, 2] - some[:, 0, 0]).max()) + full * float(linear.rest.max())
        sent = said["total"] + again * (said["fetch_forward"] + said["move_forward"])
        messages = _messages(plan, "forward") * (1 + again) + _messages(plan, "backward")
        rows, moves = _remap(plan, self._shares) * (2 + full)  # forward and backward
        return _Layer(
            self._on_all(timeline.compute + again * kernels),
            self._on_all(timeline.exposed + again * exposed),
            self._on_all(timeline.linear + full * linear.total),
            self._on_all(sent) + self._on_all(rows) * layer.hidden_size * self._element,
            self._on_all(messages) + self._on_all(moves),
            timeline.total + again * once_more,
        )

    def _on_all(self, values: np.ndarray) -> np.ndarray:
        """Of context-parallel ranks, for all their tensor-parallel ranks; of these as they are."""
        return np.repeat(values, self._tp) if len(values) * self._tp == self._size else values


def _messages(plan: Plan, direction: str) -> np.ndarray:
    """Messages that each rank sends for attention in one direction, int64 [ranks]; keys and values are one."""
    out = np.zeros(plan.ranks, np.int64)
    forward = direction == "forward"
    for piece in plan.pieces:
        program = getattr(piece, direction)
        for messages in (program.fetch, program.reduce):
            out += np.bincount(messages.items["src"], minlength=plan.ranks)
        if piece.q_move is not None:  # q there, out back; dout there, dq back
            out += _of_move(piece.q_move, False) + _of_move(piece.q_move, True)
        if piece.kv_move is not None:  # k and v
            out += 2 * _of_move(piece.kv_move, not forward)
    return out


def _of_move(move: Redistribution, adjoint: bool) -> np.ndarray:
    """Messages that each rank sends in a move, or in its adjoint."""
    parts = move.parts[move.parts["src"] != move.parts["dst"]]
    return np.bincount(parts["dst" if adjoint else "src"], minlength=move.source.ranks)


def _remap(plan: Plan, shares: int) -> np.ndarray:
    """Rows and messages that each rank sends when hidden states go to attention's layout and back, fp64 [2, ranks *
    shares]; `shares`: tensor-parallel ranks that share the rows of a context-parallel rank."""
    move = None
    if plan.linear is not None:
        linear, layout = (x if shares == 1 else in_shares(x, shares, shares) for x in (plan.linear, plan.layout))
        move = Redistribution.between(linear, layout, 1)
    if move is None:
        return np.zeros((2, plan.ranks * shares))
    rows = move.sent() + move.sent(adjoint=True)
    return np.stack([rows, _of_move(move, False) + _of_move(move, True)]).astype(np.float64)
