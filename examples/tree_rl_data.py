"""Batches of trajectories for tree_rl.py: answers to prompts, and traces of an agent that branch; tokens are random."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

VOCABULARY = 512


@dataclass(frozen=True)
class Trajectory:
    """Tokens of a trajectory, the weight of each in the loss (0: not the model's own words), and its advantage."""

    tokens: np.ndarray
    weights: np.ndarray
    advantage: float


def made_of(runs: list[tuple[np.ndarray, bool]], reward: float) -> Trajectory:
    """Return a trajectory of runs of tokens, each the model's own or not; the weights of its own sum up to 1."""
    weights = np.concatenate([np.full(len(tokens), float(is_own)) for tokens, is_own in runs])
    return Trajectory(np.concatenate([tokens for tokens, _ in runs]), weights / weights.sum(), reward)


def with_advantages(group: list[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of a group with their rewards normalized over the group, as GRPO does."""
    rewards = np.array([trajectory.advantage for trajectory in group])
    normal = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [Trajectory(x.tokens, x.weights, float(gain)) for x, gain in zip(group, normal, strict=True)]


def random_tokens(rng: np.random.Generator, mean: int) -> np.ndarray:
    """Return random tokens, between half and one and a half times as many as the mean."""
    return rng.integers(3, VOCABULARY, int(rng.integers(mean - mean // 2, mean + mean // 2 + 1)))


def answers(prompt: int, arguments: argparse.Namespace) -> list[Trajectory]:
    """Return the answers to a prompt; the number of the prompt makes it."""
    rng = np.random.default_rng([arguments.seed, 0, prompt])
    question = random_tokens(rng, arguments.prompt_tokens)
    runs = [[(question, False), (random_tokens(rng, arguments.answer_tokens), True)] for _ in range(arguments.answers)]
    return with_advantages([made_of(run, rng.normal()) for run in runs])


def branches(trace: int, arguments: argparse.Namespace) -> list[Trajectory]:
    """Return the trajectories of an agent's trace: turns of the agent, each after the answer of a tool, that branch."""
    rng = np.random.default_rng([arguments.seed, 1, trace])
    paths = [[(random_tokens(rng, arguments.prompt_tokens), False)]]
    for level in range(arguments.levels):
        paths = [
            [*path, (random_tokens(rng, arguments.answer_tokens), True)]
            for path in paths
            for _ in range(rng.integers(1, 3) if level else 2)
        ]
        if level < arguments.levels - 1:
            paths = [[*path, (random_tokens(rng, arguments.answer_tokens // 2 + 1), False)] for path in paths]
    return with_advantages([made_of(path, rng.normal()) for path in paths])
