"""Prediction of a measured step: the same plans, for the same documents, modelled on a cluster.

A step is its micro-batches one after the other, a micro-batch its layers one after the other, and all ranks begin each
layer together (:func:`mindspeed_cp.simulate.simulator.simulate_plan`). The reduction of gradients comes last.
Embeddings, output layer, loss, optimizer and the work of the host are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import build_plan
from mindspeed_cp.cluster import Cluster, ComputeCost, LayerCost
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents, Redistribution, sequence_parallel_layout
from mindspeed_cp.plan import AttentionConfig, Plan, traffic
from mindspeed_cp.plan.transfers import transfers
from mindspeed_cp.report.run.step_traces import MeasuredStep, TimeBreakdown
from mindspeed_cp.simulate.linear_times import linear_times
from mindspeed_cp.simulate.simulator import simulate_plan


@dataclass(frozen=True, eq=False)
class _ModelledLayer:
    """One layer, modelled: seconds, bytes and messages of each rank of a replica, or of a pool, fp64 [cp * tp],
    tensor-parallel ranks beside each other; and seconds of all of it."""

    attention: np.ndarray
    exposed: np.ndarray
    linear: np.ndarray
    sent: np.ndarray
    messages: np.ndarray
    seconds: float


def predict_step(step: MeasuredStep, cluster: Cluster) -> TimeBreakdown:
    """Return the modelled breakdown of a step.

    Args:
        step: documents, layers and settings.
        cluster: its nodes have at least as many ranks as those of the run.

    Raises:
        ConfigError: the nodes of the cluster have fewer ranks, or the plans cannot be built.
    """
    settings, metadata = step.settings, step.metadata
    cluster = cluster.with_ranks(step.topology.ranks_per_node)
    counts = {kind: step.layers.count(kind) for kind in dict.fromkeys(step.layers)}
    simulator = _LayerSimulator(step, cluster)
    ranks = metadata["replicas"] * settings.model_parallel_size
    groups = step.groups
    sums = np.zeros((5, groups, ranks // groups))
    done = np.zeros(groups)
    for group in range(groups):
        for micro in step.micro_batches(group):
            for (attention, layer), count in counts.items():
                modelled = simulator.layer(*micro, attention, layer)
                parts = modelled.attention, modelled.exposed, modelled.linear, modelled.sent, modelled.messages
                sums[:, group] += np.stack(parts) * count
                done[group] += modelled.seconds * count
    total = done.max() + cluster.reduction_seconds(
        metadata["gradient_bytes"], metadata["replicas"] * settings.context_parallel_suite.context_parallel_size
    )
    attention_s, exposed, linear, sent, messages = sums.reshape(5, ranks)  # replicas are consecutive ranks
    waiting = total - attention_s - exposed - linear
    return TimeBreakdown(attention_s, exposed, waiting, np.zeros(ranks), linear, sent, messages)


class _LayerSimulator:
    """Simulates layers on a cluster, each different one once.

    Args:
        step: the step, with its topology and the settings of the run.
        cluster: cluster with as many ranks a node as the plans.
    """

    def __init__(self, step: MeasuredStep, cluster: Cluster) -> None:
        self._cluster, self._settings, self._path = cluster, step.settings, step.ranks[0].path
        self._element_bytes: int = step.metadata["bytes_per_element"]
        self._topology = step.topology
        self._tp = step.settings.train.tensor_model_parallel_size
        self._shares = self._tp if step.settings.train.sequence_parallel else 1
        self._layers: dict[tuple[Any, ...], _ModelledLayer] = {}

    def layer(
        self,
        documents: Documents,
        algorithm: str,
        options: dict[str, Any],
        attention: AttentionConfig,
        layer: LayerCost,
    ) -> _ModelledLayer:
        """Return one layer: forward, backward, and the forwards that the backward computes again."""
        key = documents, algorithm, tuple(options.items()), attention, layer
        if key not in self._layers:
            try:
                plan = build_plan(documents, self._topology, attention, algorithm, **options)
            except ConfigError as error:
                message = f"{self._path}: its plans cannot be made: {error}; remove it, and trace again"
                raise ConfigError(message) from None
            self._layers[key] = self._simulate(plan, layer)
        return self._layers[key]

    def _simulate(self, plan: Plan, layer: LayerCost) -> _ModelledLayer:
        bytes_sent = traffic(plan, self._element_bytes)
        timeline = simulate_plan(plan, self._cluster, layer)
        forward, is_attention = timeline.steps_forward, timeline.is_attention("forward")
        posting, posting_backward = (timeline.posting(direction) for direction in ("forward", "backward"))
        linear = linear_times(plan, ComputeCost(self._cluster, plan.attention, layer), backward=False)
        granularity = self._settings.model.recompute_granularity
        recomputes, full = int(granularity is not None), int(granularity == "full")
        edge = 0 if full else timeline.edge_steps - 1  # without them: attention alone
        repeated = forward[:, edge : forward.shape[1] - edge]
        kernels = (forward[:, :, 1] - forward[:, :, 0] - posting)[:, is_attention].sum(1)
        # Measured posting is a part of what messages expose.
        posting_repeated = posting[:, edge : forward.shape[1] - edge].sum(1)
        exposed = (repeated[:, :, 2] - repeated[:, :, 1]).sum(1) + posting_repeated
        posted = posting.sum(1) + posting_backward.sum(1)
        seconds = float((repeated[:, -1, 2] - repeated[:, 0, 0]).max()) + full * float(linear.rest.max())
        fetched_again = bytes_sent["fetch_forward"] + bytes_sent["redistribution_forward"]
        forward_messages, backward_messages = (
            _messages(plan, direction, self._element_bytes) for direction in ("forward", "backward")
        )
        messages = forward_messages * (1 + recomputes) + backward_messages
        rows, moves = _hidden_state_traffic(plan, self._shares) * (2 + full)  # forward and backward
        hidden_bytes = self._repeat_over_tp(rows) * layer.hidden_size * self._element_bytes
        return _ModelledLayer(
            self._repeat_over_tp(timeline.compute - posted + recomputes * kernels),
            self._repeat_over_tp(timeline.exposed + posted + recomputes * exposed),
            self._repeat_over_tp(timeline.linear + full * linear.total),
            self._repeat_over_tp(bytes_sent["total"] + recomputes * fetched_again) + hidden_bytes,
            self._repeat_over_tp(messages) + self._repeat_over_tp(moves),
            timeline.total + recomputes * seconds,
        )

    def _repeat_over_tp(self, values: np.ndarray) -> np.ndarray:
        """Repeat values of context-parallel ranks for their tensor-parallel ranks; return values of those unchanged."""
        return np.repeat(values, self._tp) if len(values) == self._topology.ranks else values


def _messages(plan: Plan, direction: str, bytes_per_element: int) -> np.ndarray:
    """Return the messages that each rank sends for attention in one direction, int64 [ranks]; keys and values count as
    one."""
    return np.bincount(transfers(plan, direction, bytes_per_element)["src"], minlength=plan.ranks)


def _messages_of_redistribution(move: Redistribution, adjoint: bool) -> np.ndarray:
    """Return the messages that each rank sends in a redistribution, or in its adjoint."""
    parts = move.remote_pairs
    return np.bincount(parts["dst" if adjoint else "src"], minlength=move.source.ranks)


def _hidden_state_traffic(plan: Plan, shares: int) -> np.ndarray:
    """Return the rows and messages that each rank sends when hidden states move to the layout of attention and back,
    fp64 [2, ranks * shares].

    Args:
        plan: any plan.
        shares: tensor-parallel ranks that share the rows of a context-parallel rank.
    """
    if plan.linear_layout is None:
        return np.zeros((2, plan.ranks * shares))
    linear, layout = (
        layout if shares == 1 else sequence_parallel_layout(layout, shares, shares)
        for layout in (plan.linear_layout, plan.layout)
    )
    move = Redistribution.between(linear, layout, 1)
    if move is None:
        return np.zeros((2, plan.ranks * shares))
    rows = move.send_volume() + move.send_volume(adjoint=True)
    messages = _messages_of_redistribution(move, False) + _messages_of_redistribution(move, True)
    return np.stack([rows, messages]).astype(np.float64)
