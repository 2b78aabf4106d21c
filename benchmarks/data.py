"""Document lengths and attention heads of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindspeed_cp import AttentionConfig, Topology
from mindspeed_cp.cluster import load_cluster
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError

#: Folder of real document lengths, which not every checkout has.
REAL_LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "lengths"

HEADS = {"mha": AttentionConfig(heads=32, head_dim=128), "gqa8": AttentionConfig(heads=32, kv_heads=8, head_dim=128)}


def real_lengths_folder(name: str) -> Path | None:
    """Return the folder of the real lengths of a set; None if they are missing: then configs/lengths has its bins."""
    return REAL_LENGTHS if (REAL_LENGTHS / f"{name}.npz").exists() else None


# Sets of document lengths by name: real corpora, and shapes that corpora do not have.
#
# A set is a function of the tokens of a batch, the ranks that it is for, and a generator; it returns int64 [documents]
# with about so many tokens.


LengthSet = Callable[[int, int, np.random.Generator], np.ndarray]


def _cut_at(tokens: int, lengths: np.ndarray) -> np.ndarray:
    """Return the first lengths, the last one cut, that make just so many tokens."""
    lengths = np.maximum(lengths.astype(np.int64), 1)
    count = int(np.searchsorted(np.cumsum(lengths), tokens)) + 1
    lengths = lengths[:count]
    lengths[-1] -= max(int(lengths.sum()) - tokens, 0)
    return lengths[lengths > 0]


def _real(name: str) -> LengthSet:
    def draw(tokens: int, ranks: int, random: np.random.Generator) -> np.ndarray:
        return sample_batch(name, tokens, int(random.integers(2**31)), folder=real_lengths_folder(name))

    return draw


#: equal: up to twice as many documents as ranks. bimodal: nine documents of 300 tokens for one of an eighth of the
#: batch. pareto: exponent 1.1 above 200 tokens. one-giant: half of the batch, and 64 equal ones. share+1: for each rank
#: but one a document of one token more than the rank's share, so that whole documents leave a rank empty.
FURTHER_SETS: dict[str, LengthSet] = {
    "equal": lambda tokens, ranks, random: np.full(n := int(random.integers(1, 2 * ranks + 2)), tokens // n),
    "bimodal": lambda tokens, ranks, random: _cut_at(
        tokens, np.where(random.random(tokens // 100) < 0.9, 300, tokens // 8)
    ),
    "pareto": lambda tokens, ranks, random: _cut_at(tokens, 200 * (1 + random.pareto(1.1, tokens // 200))),
    "one-giant": lambda tokens, ranks, random: np.append(tokens // 2, np.full(64, tokens // 128)),
    "share+1": lambda tokens, ranks, random: np.full(ranks - 1, tokens // ranks + 1),
}
SETS: dict[str, LengthSet] = {"wikipedia": _real("wikipedia"), "prolong": _real("prolong"), **FURTHER_SETS}


# Topologies of the benchmarks.


def place_of(name: str, ranks: int) -> Topology:
    """Return the topology of a number of ranks of a cluster.

    Raises:
        ConfigError: there is no such cluster, or the ranks do not make whole nodes.
    """
    per_node = min(ranks, load_cluster(name).ranks_per_node)
    if ranks % per_node:
        raise ConfigError(f"{ranks} ranks: valid for cluster {name}: up to {per_node}, or a multiple of these")
    return Topology(ranks // per_node, per_node, name)
