"""Groups of Megatron's arguments that touch neither attention, positions, loss nor batches.

A group that is not named here is concerned, so that a new group of a new version is looked at.
"""

from __future__ import annotations

#: Title of the group in Megatron's parser -> what its arguments are about.
UNCONCERNED_GROUPS = {
    "straggler": "finds slow ranks",
    "workload inspector": "a server that answers questions about the run",
    "one logger": "logs",
    "ft_package": "restarts",
    "In-process restart": "restarts",
    "autoresume": "restarts",
    "fault injector": "faults, on purpose",
    "rerun engine": "computes a step again to find broken hardware",
    "config logger": "logs",
    "logging": "logs",
    "profiling": "profiles",
    "checkpointing": "reads and writes checkpoints",
    "learning rate": "the optimizer's rate",
    "learning rate and weight decay": "the optimizer's rate",
    "msc": "where files are",
    "biencoder": "of other models than GPT",
    "vision": "of other models than GPT",
    "retro": "of other models than GPT",
}
