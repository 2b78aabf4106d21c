"""Steps on trajectories packed as trees, and the same trajectories one by one through the model as transformers has it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.meshes import wrap
from tests.integrations.huggingface.models import VOCABULARY, Step, make_config, make_model, mesh_of

CLIP = 0.1  # of ratios to old log-probabilities


def trajectories(seed: int = 0) -> list[np.ndarray]:
    """Answers to a prompt, an agent's trace of four levels, a trajectory that is a prefix of another, equal ones, one
    of a single token, and one that shares nothing."""
    rng = np.random.default_rng(seed)

    def tokens(first: int, count: int) -> list[int]:
        return [first, *rng.integers(3, VOCABULARY, count - 1).tolist()]

    prompt = tokens(10, 13)
    answers = [prompt + tokens(20 + i, length) for i, length in enumerate((7, 1, 12))]
    task = tokens(11, 9)
    call, other = task + tokens(30, 6), task + tokens(31, 4)
    left, right = call + tokens(32, 5), call + tokens(33, 3)
    trace = [left + tokens(34, 6), left + tokens(35, 2), right + tokens(36, 8), right, other + tokens(37, 11)]
    return [np.array(t) for t in (*answers, *trace, answers[0], [12], tokens(13, 5))]


def token_weights(lengths: list[int], seed: int = 1) -> list[np.ndarray]:
    """Loss weights of tokens, 0 for a third of them; those of a trajectory are of another size than of the next."""
    rng = np.random.default_rng(seed)
    return [(0.2 + i) * rng.random(length) * (rng.random(length) < 0.67) for i, length in enumerate(lengths)]


def advantages(count: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=count)


def term(kind: str, new: Tensor, old: np.ndarray, advantage: float, weight: np.ndarray) -> Tensor:
    """Loss of a trajectory: weighted cross-entropy, a clipped ratio to old log-probabilities, or the geometric mean of
    its tokens' ratios."""
    weights = torch.tensor(weight[1:]).float()
    if kind == "cross entropy":
        return -(weights * new).sum()
    ratio = (new - torch.tensor(old[1:]).float()).exp()
    if kind == "sequence":
        return -float(advantage) * ratio.log().mean().exp() if len(new) else torch.zeros(())
    return -(weights * torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)).sum()


def reference_model(name: str) -> Any:
    return make_model(make_config(name), "eager" if name in ("gemma2", "gpt_oss") else "sdpa")


def one_by_one(model: Any, batch: list[np.ndarray]) -> list[Tensor]:
    """Log-probabilities of all tokens but the first of each trajectory."""
    listed = []
    for tokens in batch:
        ids = torch.from_numpy(tokens)[None]
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        listed.append(log_probs[torch.arange(len(tokens) - 1), ids[0, 1:]])
    return listed


@cache
def old_log_probs(name: str, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Log-probabilities of another model's making, some of them further away than the clip; [length] each."""
    rng = np.random.default_rng(3)
    with torch.no_grad():
        now = one_by_one(reference_model(name), trajectories(seed))
    return tuple(np.append(0, x.numpy() + rng.normal(scale=0.15, size=len(x))) for x in now)


@cache
def reference_step(name: str, kind: str, seeds: tuple[int, ...] = (0,)) -> Step:
    """The trajectories of all seeds one by one; a loss other than cross-entropy is for those of seed 0."""
    model, total, divisor = reference_model(name), torch.zeros(()), 0.0
    for seed in seeds:
        batch = trajectories(seed)
        weights, gains = token_weights([len(tokens) for tokens in batch]), advantages(len(batch))
        divisor += len(batch) if kind == "sequence" else sum(float(weight[1:].sum()) for weight in weights)
        rows = zip(one_by_one(model, batch), old_log_probs(name, seed), gains, weights, strict=True)
        total = total + torch.stack([term(kind, *row) for row in rows]).sum()
    (total / divisor).backward()
    return Step(
        float(total.detach()) / divisor, {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    )


def tree_step(
    rank: int,
    group: Any,
    name: str,
    kind: str,
    algorithm: str,
    olds: tuple[np.ndarray, ...] = (),
    changes: dict[str, Any] | None = None,
) -> Step:
    """One rank's step; gradients are averaged over the group, as DDP does."""
    batch, ranks = trajectories(), group.size()
    packed = Documents.from_trajectories(batch)
    model = make_model(make_config(name, **changes or {}), cp.register())
    weights = token_weights([len(tokens) for tokens in batch])
    rows, targets = cp.planned_trajectories(
        packed, model.config, mesh_of(ranks, rank, group), algorithm,
        weights=weights, dropout_seed=11,
    )  # fmt: skip
    share = loss_of_rank(kind, model(**rows).logits, targets, olds, weights, group)
    share.backward()
    gradients = {key: x.grad / ranks for key, x in model.named_parameters() if x.grad is not None}
    total = share.detach() / ranks
    for gradient in [*gradients.values(), total]:
        dist.all_reduce(gradient, group=group)
    return Step(float(total), gradients)


def loss_of_rank(
    kind: str,
    logits: Tensor,
    targets: cp.RankTargets,
    olds: tuple[np.ndarray, ...],
    weights: list[np.ndarray],
    group: Any,
) -> Tensor:
    """One rank's share of the loss."""
    divisor, gains = cp.sum_weights(targets, group), advantages(len(weights))
    if kind == "cross entropy":
        return cp.tree_loss(logits, targets, divisor, group)
    news = cp.trajectory_log_probs(logits, targets, gradient_factor=group.size())
    total = torch.stack([term(kind, *x) for x in zip(news, olds, gains, weights, strict=True)]).sum()
    return total / (len(weights) if kind == "sequence" else divisor)


def wrapped_step(rank: int, group: Any, name: str, kind: str) -> Step:
    """The step of one of four ranks: two replicas, with trajectories of their own, of two context-parallel ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = make_model(make_config(name), cp.register())
    wrapped, batch = wrap(model, kind, mesh), trajectories(mesh["dp"].get_local_rank())
    weights = token_weights([len(tokens) for tokens in batch])
    packed = Documents.from_trajectories(batch)
    rows, targets = cp.planned_trajectories(packed, model.config, mesh["cp"], weights=weights)
    share = cp.tree_loss(wrapped(**rows).logits, targets, cp.sum_weights(targets, group), group)
    share.backward()
    gradients = {key.removeprefix("module."): x.grad for key, x in wrapped.named_parameters() if x.grad is not None}
    total = share.detach() / group.size()
    dist.all_reduce(total, group=group)
    whole = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in gradients.items()}
    return Step(float(total), whole)


def differing_call(rank: int, group: Any, fault: str) -> str:
    """Run a model on three ranks, of which rank 1 has another batch; return the error's text, or "trains"."""
    batch = trajectories()
    weights = token_weights([len(tokens) for tokens in batch]) if fault != "order" else None
    if rank == 1:
        if fault == "order":  # of two trajectories, one of which is the beginning of the other: the tree is the same
            batch[5], batch[6] = batch[6], batch[5]
        if fault == "token":
            batch[0][-1] = batch[8][-1] = 3
        if fault == "weight" and weights:
            weights[2][-1] += 0.5
    packed = Documents.from_trajectories(batch)
    model = make_model(make_config("llama"), cp.register())
    try:
        model(**cp.planned_trajectories(packed, model.config, mesh_of(3, rank, group), "ring", weights=weights)[0])
    except ConfigError as error:
        return str(error)
    return "trains"


def sum_of_negative_weights(rank: int, group: Any) -> str:
    """Return the error of sum_weights where one rank alone has targets with weights below 0."""
    packed = Documents.from_trajectories(trajectories())
    weights = [1.0 - 2 * rank] * len(packed.tree_tokens)
    _, targets = cp.planned_trajectories(packed, make_config("llama"), mesh_of(2, rank, group), "ring", weights=weights)
    try:
        return str(float(cp.sum_weights(targets, group)))
    except ConfigError as error:
        return str(error)
