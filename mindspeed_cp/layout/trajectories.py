"""Trajectories as trees: shared prefixes are found and stored once, and every token to predict is listed once.

Answers sampled for one prompt, or an agent's traces that branch, begin alike. `Documents.from_trajectories` makes one
document of every run of tokens that the same trajectories share::

    trajectories      1 2 3 4 5        documents   0: 1 2 3      parents  -1
                      1 2 3 4 6                    1: 4                    0
                      1 2 3 7                      2: 5                    1
                                                   3: 6                    1
                                                   4: 7                    0

A model computes each tree token once. What it has to predict are pairs of a tree token and a token that follows it:
token 3 is followed by 4 and by 7 and has two targets. The loss of all trajectories is a sum over targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout.host_arrays import as_integers
from mindspeed_cp.schema.numbers import check_count, check_type


@dataclass(frozen=True, eq=False)
class TreeTargets:
    """Tokens to predict: each pair of a tree token and a token that follows it in some trajectory, once.

    Attributes:
        source: tree token whose logits predict the target, int64 [targets], ascending.
        token: number of the token to predict, int64 [targets].
        of_trajectories: for each trajectory the targets of its tokens but the first, int64 [length - 1] each.
    """

    source: np.ndarray
    token: np.ndarray
    of_trajectories: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_first(self) -> np.ndarray:
        """True for the first target of each tree token; the others are those of tokens after which trajectories branch;
        bool [targets]."""
        return np.diff(self.source, prepend=-1) != 0

    def weights(self, weights: Sequence[Any] | None = None) -> np.ndarray:
        """Sum the loss weights that trajectories give to targets.

        With them the weighted sum over targets is the weighted sum over the tokens of all trajectories, for a loss that
        depends on the target's logits alone. A loss that differs between trajectories (a ratio to old probabilities,
        clipped) takes the targets' log-probabilities and :attr:`of_trajectories` instead.

        Args:
            weights: for each trajectory the weight of every token as one to predict, [length] (the first is not
                used), or one number for all of them; default: 1.

        Returns:
            fp64 [targets].

        Raises:
            ConfigError: not one entry for each trajectory, its length is not the trajectory's, or a weight is not
                finite.
        """
        if weights is not None:
            check_type("weights", weights, Iterable, "one entry for each trajectory, or None")
        out = np.zeros(len(self))
        given: Sequence[Any] = [1.0] * len(self.of_trajectories) if weights is None else list(weights)
        if len(given) != len(self.of_trajectories):
            raise ConfigError(
                f"weights has {len(given)} entries; valid: one for each of the {len(self.of_trajectories)} trajectories"
            )
        for number, (targets, values) in enumerate(zip(self.of_trajectories, given, strict=True)):
            array = np.asarray(values, np.float64)
            if array.ndim and array.shape != (len(targets) + 1,):
                raise ConfigError(
                    f"weights[{number}] has shape {list(array.shape)}; valid: one number, or [{len(targets) + 1}], one "
                    "for each token of the trajectory"
                )
            if not np.isfinite(array).all():
                raise ConfigError(f"weights[{number}] has values that are not finite; valid: finite numbers")
            np.add.at(out, targets, array[1:] if array.ndim else array)
        return out

    def of_rows(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets that a rank's rows predict.

        Args:
            tokens: tree token of each row, ``plan.batch_layout.tokens(rank)``, int64 [t].

        Returns:
            Numbers of targets, and the local row that predicts each, int64 [targets of this rank] each.
        """
        row_of = np.full(max(int(tokens.max(initial=-1)), int(self.source.max(initial=-1))) + 1, -1)
        row_of[tokens] = np.arange(len(tokens))
        targets = np.flatnonzero(row_of[self.source] >= 0)
        return targets, row_of[self.source[targets]]


def shared_prefixes(
    trajectories: Iterable[Any], min_shared: int, must_share: bool
) -> tuple[list[int], list[int], np.ndarray, list[np.ndarray]]:
    """Find the prefixes that trajectories share; arguments and errors as for `Documents.from_trajectories`.

    Returns:
        Lengths and parents of documents in preorder, their tokens, and for each trajectory the tree tokens of its path,
        int64 [length] each.
    """
    check_type("trajectories", trajectories, Iterable, "a list with the token numbers of each trajectory")
    check_count("min_shared", min_shared, what="a whole number of tokens")
    listed = [as_integers(f"trajectories[{i}]", tokens, 1) for i, tokens in enumerate(trajectories)]
    if not listed:
        raise ConfigError("trajectories is empty; valid: the token numbers of one trajectory or more")
    empty = next((i for i, tokens in enumerate(listed) if not len(tokens)), None)
    if empty is not None:
        raise ConfigError(f"trajectories[{empty}] has no tokens; valid: 1 token or more; leave it out")
    lengths, parents, tokens, tree_tokens = _trees_of(listed, min_shared)
    if must_share and len(lengths) == len(listed) and max(parents) < 0:
        least = "token" if min_shared == 1 else f"{min_shared} tokens"
        raise ConfigError(
            f"trajectories: no two of the {len(listed)} begin with the same {least}; valid: trajectories that share "
            "prefixes, or for separate documents Documents(lengths); must_share=False takes any"
        )
    return lengths, parents, tokens, tree_tokens


def _trees_of(
    trajectories: Sequence[np.ndarray], min_shared: int
) -> tuple[list[int], list[int], np.ndarray, list[np.ndarray]]:
    """Do as `shared_prefixes`."""
    lengths: list[int] = []
    parents: list[int] = []
    runs: list[np.ndarray] = []
    paths: list[list[np.ndarray]] = [[] for _ in trajectories]
    tokens = 0
    open_groups = [(group, 0, -1) for group in reversed(_grouped(trajectories, range(len(paths)), 0, min_shared))]
    while open_groups:
        group, start, parent = open_groups.pop()
        stop = _shared_until(trajectories, group, start)
        node = len(lengths)
        lengths.append(stop - start)
        parents.append(parent)
        runs.append(trajectories[group[0]][start:stop])
        for number in group:
            paths[number].append(np.arange(tokens, tokens + stop - start))
        tokens += stop - start
        going_on = [number for number in group if len(trajectories[number]) > stop]
        open_groups += [(below, stop, node) for below in reversed(_grouped(trajectories, going_on, stop, 1))]
    return lengths, parents, np.concatenate(runs), [np.concatenate(path) for path in paths]


def tree_targets(tokens: np.ndarray, tree_tokens: Sequence[np.ndarray]) -> TreeTargets:
    """Return the tokens to predict, each once; arguments as the attributes of PackedTrajectories."""
    length = np.array([len(path) - 1 for path in tree_tokens], np.int64)
    nothing = np.zeros(0, np.int64)
    source = np.concatenate([nothing, *(path[:-1] for path in tree_tokens)])
    follower = np.concatenate([nothing, *(path[1:] for path in tree_tokens)])
    pairs, index = np.unique(np.stack([source, follower]), axis=1, return_inverse=True)
    of_trajectories = np.split(index.reshape(-1), np.cumsum(length)[:-1]) if len(length) else []
    return TreeTargets(pairs[0], tokens[pairs[1]], tuple(of_trajectories))


def _grouped(trajectories: Sequence[np.ndarray], numbers: Iterable[int], start: int, tokens: int) -> list[list[int]]:
    """Group trajectories by their next tokens, in the order of the first of each group."""
    groups: dict[bytes, list[int]] = {}
    for number in numbers:
        groups.setdefault(trajectories[number][start : start + tokens].tobytes(), []).append(number)
    return list(groups.values())


def _shared_until(trajectories: Sequence[np.ndarray], group: Sequence[int], start: int) -> int:
    """Return the number of tokens that all trajectories of a group have in common; the first `start` are."""
    first, stop = trajectories[group[0]], len(trajectories[group[0]])
    for number in group[1:]:
        other = trajectories[number]
        stop = min(stop, len(other))
        differs = np.flatnonzero(first[start:stop] != other[start:stop])
        stop = start + int(differs[0]) if len(differs) else stop
    return stop
