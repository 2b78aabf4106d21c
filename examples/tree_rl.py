"""One step of reinforcement learning on trajectories as trees and flat: the same loss and gradients, in less work.

::

    python examples/tree_rl.py                          # 2 local ranks on this CPU
    python examples/tree_rl.py --model gpt_oss --ranks 4 --cp 2 --algorithm direct
    torchrun --nproc-per-node 8 examples/tree_rl.py --cp 8 --device cuda --answer-tokens 2048 --prompt-tokens 1024

Two batches are trained: groups of answers sampled for one prompt each (the shape of GRPO, 2402.03300), and traces of an
agent that branch at every level. As trees every shared prefix is computed once; flat, every trajectory is a document of
its own. Both are steps of the same small model of random weights, first with the weighted cross-entropy of the
trajectories, then, after an update, with GRPO's clipped ratio to the probabilities before it, in which every trajectory
has an advantage. Losses, norms and all gradients of both are compared: the exit status is 1 if they differ by more than
1e-5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from finetune_hf import BACKENDS, MODELS, open_local_store, take_local_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from tree_rl_data import VOCABULARY, Trajectory, answers, branches

from mindspeed_cp import Documents
from mindspeed_cp.integrations import huggingface as cp
from mindspeed_cp.plan.problem import document_pairs

CLIP = 0.2  # GRPO's range of ratios: 1 - CLIP to 1 + CLIP
TOLERANCE = 1e-5

_HEADINGS = f"""\
  {"":14}{"loss":>11} {"":11} {"norm of gradients":>17} {"":5} {"largest":>11}{"seconds":>10}
  {"":14}{"tree":>11} {"flat":>11} {"tree":>11} {"flat":>11} {"difference":>11}{"tree":>10} {"flat":>7} {"ratio":>6}"""


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    causal = [name for name in MODELS if cp.FAMILIES[name].mask == "causal"]
    parser.add_argument("--model", choices=causal, default="llama", help="family of the random model (llama)")
    parser.add_argument("--ranks", type=int, default=2, help="local ranks, where torchrun did not start them (2)")
    parser.add_argument("--cp", type=int, help="context-parallel ranks of a replica (all)")
    parser.add_argument("--algorithm", default="hierarchical", help="algorithm of the plans (hierarchical)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of the batch (16)")
    parser.add_argument("--answers", type=int, default=8, help="answers to each prompt (8)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean length of a prompt (64)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="mean length of an answer, or a turn (32)")
    parser.add_argument("--traces", type=int, default=4, help="traces of an agent (4)")
    parser.add_argument("--levels", type=int, default=5, help="turns of a trace, after each of which it branches (5)")
    parser.add_argument("--repeats", type=int, default=3, help="times that each step is timed (3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    arguments = parser.parse_args()
    least = {"ranks": 1, "prompts": 1, "answers": 2, "prompt_tokens": 2, "answer_tokens": 2, "traces": 1, "repeats": 1}
    for name, count in (least | {"levels": 2}).items():
        if getattr(arguments, name) < count:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}; valid: {count} or more")
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    arguments.cp = ranks if arguments.cp is None else arguments.cp
    if arguments.cp < 1 or ranks % arguments.cp:
        parser.error(f"--cp {arguments.cp}; valid: a divisor of the number of ranks, which is {ranks}")
    replicas = ranks // arguments.cp
    for name in ("prompts", "traces"):
        if getattr(arguments, name) < replicas:
            parser.error(f"--{name} {getattr(arguments, name)}; valid: {replicas} or more, one for each replica")
    return arguments


class AsTree:
    """A batch whose shared prefixes are computed once.

    Attributes:
        copies: ranks that have the log-probabilities of all tokens and compute the same loss of them.
    """

    def __init__(self, batch: list[Trajectory], config: Any, mesh: Any, algorithm: str) -> None:
        packed = Documents.from_trajectories([trajectory.tokens for trajectory in batch])
        self.documents, self.copies = packed.documents, mesh.size()
        weights = [trajectory.weights for trajectory in batch]
        self.rows, self.targets = cp.planned_trajectories(packed, config, mesh, algorithm, weights=weights)
        self.divisor = cp.sum_weights(self.targets)
        weights = [trajectory.weights[1:] for trajectory in batch]
        gains = [np.repeat(trajectory.advantage, len(trajectory.tokens) - 1) for trajectory in batch]
        self.token_weights, self.advantages = (
            torch.tensor(np.concatenate(x)).float().to(mesh.device_type) for x in (weights, gains)
        )

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the loss."""
        return cp.tree_loss(logits, self.targets, self.divisor)

    def token_log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens of all trajectories of the replica, the same on its ranks."""
        return torch.cat(cp.trajectory_log_probs(logits, self.targets, gradient_factor=self.copies))


class Flat:
    """A batch of which each trajectory is a document."""

    copies = 1

    def __init__(self, batch: list[Trajectory], config: Any, mesh: Any, algorithm: str) -> None:
        self.documents = Documents([len(trajectory.tokens) for trajectory in batch])
        tokens = torch.from_numpy(np.concatenate([trajectory.tokens for trajectory in batch]))[None]
        # A row predicts the token after it.
        weights = np.concatenate([np.append(trajectory.weights[1:], 0.0) for trajectory in batch])
        gains = np.repeat([trajectory.advantage for trajectory in batch], self.documents.lengths)
        whole = {"input_ids": tokens, "labels": tokens}
        whole |= {"weights": torch.tensor(weights[None]).float(), "advantages": torch.tensor(gains[None]).float()}
        whole = {name: value.to(mesh.device_type) for name, value in whole.items()}
        self.rows, labels = cp.planned_batch(whole, config, mesh, algorithm, documents=self.documents)
        self.labels = labels.clamp(min=0)  # rows that predict nothing have the weight 0
        self.token_weights, self.advantages = self.rows.pop("weights"), self.rows.pop("advantages")
        self.divisor = self.token_weights.sum()
        dist.all_reduce(self.divisor)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the loss."""
        return cp.loss_share(-(self.token_weights * self.token_log_probs(logits)).sum(), self.divisor)

    def token_log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the token after each row."""
        return logits.float().log_softmax(-1).gather(-1, self.labels[..., None])[..., 0]


def clipped_ratio(batch: AsTree | Flat, logits: Tensor, old: Tensor) -> Tensor:
    """Return this rank's share of GRPO's loss, without its penalty; `old` are log-probabilities before the update."""
    ratio, gain = (batch.token_log_probs(logits) - old).exp(), batch.advantages
    terms = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    return cp.loss_share(-(batch.token_weights * terms).sum(), batch.divisor) / batch.copies


@dataclass
class Step:
    """What a step gives: its loss, its gradients, and its seconds."""

    loss: float
    gradients: list[Tensor]
    seconds: float

    @property
    def norm(self) -> float:
        """Norm of all gradients."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients]).norm())


def run_step(model: Any, batch: AsTree | Flat, loss: Callable[[Tensor], Tensor]) -> Step:
    """Run forward and backward pass of one step; gradients are averaged over all ranks."""
    model.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    share = loss(model(**batch.rows).logits)
    share.backward()
    total = share.detach() / dist.get_world_size()
    dist.all_reduce(total)
    value = float(total)  # waits for the device
    seconds = time.perf_counter() - start
    return Step(value, [x.grad.clone() for x in model.parameters() if x.grad is not None], seconds)


def largest_gradient_difference(tree: Step, flat: Step) -> float:
    """Return the largest difference of a gradient, relative to the largest of its tensor, and if that is small to a
    hundredth of the largest of all."""
    largest = max(float(gradient.abs().max()) for gradient in flat.gradients)
    return max(
        float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 0.01 * largest)
        for ours, theirs in zip(tree.gradients, flat.gradients, strict=True)
    )


def compare(label: str, model: Any, losses: list[tuple[Any, Callable[[Tensor], Tensor]]], repeats: int) -> bool:
    """Run a step as tree and flat in turn, print both, and return True if they are equal."""
    steps = [[run_step(model, batch, loss) for batch, loss in losses] for _ in range(repeats)]
    tree, flat = steps[0]
    seconds = [statistics.median(pair[i].seconds for pair in steps) for i in (0, 1)]
    gradients = largest_gradient_difference(tree, flat)
    differences = torch.tensor([abs(tree.loss - flat.loss), abs(tree.norm / flat.norm - 1), gradients])
    is_equal = bool((differences <= TOLERANCE).all())  # not of a NaN
    if dist.get_rank() == 0:
        print(f"  {label:14}{tree.loss:11.7f} {flat.loss:11.7f} {tree.norm:11.7f} {flat.norm:11.7f} {gradients:11.1e}"
              f"{seconds[0]:10.3f} {seconds[1]:7.3f} {seconds[0] / seconds[1]:6.2f}"
              + ("" if is_equal else f"  DIFFERS by more than {TOLERANCE}"), flush=True)  # fmt: skip
    return is_equal


def train(label: str, batch: list[Trajectory], model: Any, mesh: Any, arguments: argparse.Namespace) -> bool:
    """Train a batch as tree and flat; return True if both are equal."""
    config, started = model.module.config, time.perf_counter()
    tree = AsTree(batch, config, mesh, arguments.algorithm)
    planned = time.perf_counter()
    flat = Flat(batch, config, mesh, arguments.algorithm)
    if dist.get_rank() == 0:
        tokens, pairs = ([count(x) for x in (tree, flat)] for count in (lambda x: x.documents.tokens, pairs_of))
        print(
            f"{label}: {len(batch)} trajectories{' of a replica' if mesh.size() < dist.get_world_size() else ''}, "
            f"{len(tree.documents)} documents\n  {tokens[0]} tokens as trees, {tokens[1]} flat "
            f"({tokens[0] / tokens[1]:.2f}); pairs of query and key {pairs[0] / pairs[1]:.2f} of flat; plans in "
            f"{planned - started:.2f} s and {time.perf_counter() - planned:.2f} s\n{_HEADINGS}",
            flush=True,
        )
    with torch.no_grad():
        olds = [x.token_log_probs(model(**x.rows).logits) for x in (tree, flat)]
    pair = (tree, flat)
    is_equal = compare("cross-entropy", model, [(x, x.cross_entropy) for x in pair], arguments.repeats)
    torch.optim.SGD(model.parameters(), lr=update_rate(model)).step()
    losses = [
        (x, lambda logits, x=x, old=old: clipped_ratio(x, logits, old)) for x, old in zip(pair, olds, strict=True)
    ]
    is_equal = compare("clipped ratio", model, losses, arguments.repeats) and is_equal
    print_clipped(tree, model, olds[0])
    return is_equal


def pairs_of(batch: AsTree | Flat) -> float:
    """Return the pairs of a query and a key that the attention of all layers computes."""
    layers = batch.rows["plan"].plans.attentions
    return sum(float(document_pairs(batch.documents, batch.documents, layer).sum()) for layer in layers)


def print_clipped(batch: AsTree, model: Any, old: Tensor) -> None:
    """Print how many of the trajectories' own tokens have a ratio outside the range."""
    with torch.no_grad():
        ratio = (batch.token_log_probs(model(**batch.rows).logits) - old).exp()[batch.token_weights > 0]
    counts = torch.tensor([int(((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).sum()), len(ratio)], device=ratio.device)
    dist.all_reduce(counts)
    counts //= batch.copies
    if dist.get_rank() == 0:
        print(f"  {int(counts[0])} of {int(counts[1])} ratios are outside {1 - CLIP} .. {1 + CLIP}", flush=True)


def update_rate(model: Any) -> float:
    """Return a rate with which the gradients at hand change weights so much that some ratios are clipped."""
    norms = [(x.detach().norm(), x.grad.norm()) for x in model.parameters() if x.grad is not None]
    weights, gradients = (float(torch.stack(values).norm()) for values in zip(*norms, strict=True))
    return 0.005 * weights / gradients


def run(arguments: argparse.Namespace) -> bool:
    """Train on this rank; return True if trees and flat trajectories are equal."""
    dist.init_process_group(BACKENDS[arguments.device])
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(arguments.device if arguments.device == "cpu" else f"{arguments.device}:{local}")
    if arguments.device != "cpu":
        getattr(torch, arguments.device).set_device(local)
    replicas = dist.get_world_size() // arguments.cp
    mesh = init_device_mesh(arguments.device, (replicas, arguments.cp), mesh_dim_names=("dp", "cp"))
    replica = mesh["dp"].get_local_rank()
    groups = [answers(number, arguments) for number in range(replica, arguments.prompts, replicas)]
    traces = [branches(number, arguments) for number in range(replica, arguments.traces, replicas)]
    batches = {
        f"{arguments.prompts} prompts x {arguments.answers} answers": [x for group in groups for x in group],
        f"{arguments.traces} traces of {arguments.levels} levels": [x for group in traces for x in group],
    }
    longest = max(len(trajectory.tokens) for batch in batches.values() for trajectory in batch)
    is_equal = True
    for label, batch in batches.items():
        model = make_model(arguments, longest).to(device)
        is_equal = train(label, batch, DistributedDataParallel(model), mesh["cp"], arguments) and is_equal
    dist.destroy_process_group()
    return is_equal


def make_model(arguments: argparse.Namespace, longest: int) -> Any:
    """Return a small model of random weights that takes positions up to the longest trajectory's."""
    cp.register()
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(arguments.model, **MODELS[arguments.model], **ids)
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = max(longest, 128)
    torch.manual_seed(arguments.seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=cp.IMPLEMENTATION)


def run_local_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Train on one of the ranks that this program started."""
    take_local_rank(rank, arguments.ranks, port)
    sys.exit(0 if run(arguments) else 1)


def main() -> None:
    """Train, on ranks of torchrun or on local ones that are started here."""
    arguments = read_arguments()
    if "RANK" in os.environ:
        sys.exit(0 if run(arguments) else 1)
    store = open_local_store()
    try:
        torch.multiprocessing.spawn(run_local_rank, (arguments, store.port), nprocs=arguments.ranks)
    except torch.multiprocessing.ProcessExitedException as error:
        sys.exit(error.exit_code or 1)


if __name__ == "__main__":
    main()
