"""What `mindspeed-cp simulate` is asked: which documents, where, which attention, by which algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_cp.cli_lengths import MOST_TOKENS, VALID, check_size, draw, known_sets, read_lengths, shortened
from mindspeed_cp.config import Settings, load_settings
from mindspeed_cp.config_checks import attention_of, layer_of
from mindspeed_cp.cost import LayerCost, load_cluster, sample_lengths
from mindspeed_cp.cost.candidates import read_candidate
from mindspeed_cp.cost.links import SHARING
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import ALGORITHMS, AttentionConfig, Topology, algorithm_options
from mindspeed_cp.plan.hierarchical import DEFAULT_CLUSTER, cluster_of
from mindspeed_cp.report.simulated import Problem, Wanted

#: More ranks are refused: their timelines take minutes.
MOST_RANKS, MOST_BATCHES = 4096, 1000

#: Heads, and channels of one.
MOST_WIDTH = 2**14

#: Rows of a training's first global batch that are simulated if nothing else is asked for.
MOST_ROWS = 8

TOKENS_PER_RANK = 4096

#: Documents of a set that say how many a batch will have.
SAMPLE = 4096


@dataclass(frozen=True)
class Asked:
    """The switches that say what to simulate; None: not given."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    lengths: str | None = None
    cluster: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    tokens_per_rank: int | None = None
    seed: int | None = None
    batches: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    algorithms: str = "all"
    sharing: str = "fair"


def read(asked: Asked) -> tuple[Problem, list[Wanted]]:
    """The problem and the algorithms that the switches, and the settings file if there is one, describe.

    Raises:
        ConfigError: a switch or setting cannot be used; one line that names it, its value and what is valid.
    """
    if asked.sharing not in SHARING:
        raise ConfigError(f"--sharing {asked.sharing!r}: valid: {', '.join(SHARING)}")
    if asked.config is None:
        if asked.lengths is None:
            raise ConfigError(f"give a settings file, or --lengths: {VALID}; sets: {known_sets()}")
        if asked.overrides:
            raise ConfigError(f"--set {asked.overrides[0]}: there is no settings file to change; name one, or leave it")
        return _of_switches(asked)
    return _of_settings(asked, load_settings(asked.config, asked.overrides))


def _of_switches(asked: Asked) -> tuple[Problem, list[Wanted]]:
    heads = 32 if asked.heads is None else asked.heads
    kv_heads = (8 if heads % 8 == 0 else heads) if asked.kv_heads is None else asked.kv_heads
    for switch, value in (("--heads", heads), ("--kv-heads", kv_heads), ("--head-dim", asked.head_dim)):
        if value is not None and not 1 <= value <= MOST_WIDTH:
            raise ConfigError(f"{switch} {value}: valid: a whole number from 1 to {MOST_WIDTH:,}")
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads {kv_heads}: valid: a divisor of the query heads, --heads {heads}")
    attention = AttentionConfig(heads, kv_heads, 128 if asked.head_dim is None else asked.head_dim)
    cluster = DEFAULT_CLUSTER if asked.cluster is None else asked.cluster
    topology = _topology(asked, Topology(1, load_cluster(cluster).ranks_per_node, cluster))
    batches, source = _batches(asked, topology.ranks, None)
    layer = LayerCost.like(attention)
    problem = Problem(batches, topology, attention, cluster_of(topology), layer, source, sharing=asked.sharing)
    return problem, read_algorithms(asked.algorithms)


def _of_settings(asked: Asked, settings: Settings) -> tuple[Problem, list[Wanted]]:
    suite, model, tensor = settings.context_parallel_suite, settings.model, settings.train.tensor_model_parallel_size
    for switch, value, key in (
        ("--heads", asked.heads, "num_attention_heads"),
        ("--kv-heads", asked.kv_heads, "num_query_groups"),
        ("--head-dim", asked.head_dim, "kv_channels"),
    ):
        if value is not None:
            raise ConfigError(f"{switch} {value}: the model is that of {asked.config}; give --set model.{key}={value}")
    whole, notes = attention_of(settings), []
    attention = replace(whole, heads=whole.heads // tensor, kv_heads=whole.kv_heads // tensor)
    if 0 < model.window_layers < model.num_layers:
        with_window = model.window_layers * 2 >= model.num_layers
        attention = attention if with_window else replace(attention, window=None)
        notes.append(
            f"{model.window_layers} of {model.num_layers} layers have a window; simulated is a layer "
            f"{'with' if with_window else 'without'} one"
        )
    if model.expert_layers:
        notes.append("experts are counted as a dense FFN of the weights that a token visits, without their all-to-all")
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": settings.train.sequence_parallel,
    }
    own_options = {k: v for k, v in suite.options.items() if k not in sizes}
    sizes |= {k: v for k, v in suite.options.items() if k in sizes}
    topology = _topology(asked, suite.topology)
    if topology.cluster is None:
        notes.append(f"no cluster is named: speeds are those of {DEFAULT_CLUSTER}")
        most = load_cluster(DEFAULT_CLUSTER).ranks_per_node
        if topology.ranks_per_node > most:
            notes.append(
                f"nodes of {topology.ranks_per_node} ranks are imagined, each with a NIC and with links to all others; "
                f"those of {DEFAULT_CLUSTER} have {most}"
            )
    batches, source = _batches(asked, topology.ranks, settings)
    if asked.lengths is None and settings.data.balance != "none":
        notes.append("data.balance lays rows anew over replicas; simulated are rows as they are drawn")
    own = None
    if suite.algorithm in ALGORITHMS:  # not one that is chosen when the training begins
        own = Wanted(suite.algorithm, own_options)
    wanted = [_with_sizes(one, sizes) for one in read_algorithms(asked.algorithms, own)]
    where = batches, topology, attention, cluster_of(topology), layer_of(settings)
    return Problem(*where, source, tuple(notes), asked.sharing, sizes), wanted


def _with_sizes(wanted: Wanted, sizes: Mapping[str, Any]) -> Wanted:
    """An algorithm that costs linear layers, with the sizes of the model."""
    known = algorithm_options(wanted.algorithm)
    return replace(wanted, model={name: value for name, value in sizes.items() if name in known})


def read_algorithms(text: str, own: Wanted | None = None) -> list[Wanted]:
    """--algorithms: "all", or names with options, such as ring,direct:prefetch=4:layout=balanced.

    Args:
        text: of the switch.
        own: the algorithm of a settings file with its options, which stands for its name alone.

    Raises:
        ConfigError: a name or option is unknown; names what is valid.
    """
    out = []
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"--algorithms {text!r}: names none; valid: all, or {', '.join(ALGORITHMS)}")
    for word in list(ALGORITHMS) if words == ["all"] else words:
        if word.partition(":")[0] == "all":
            raise ConfigError(f"--algorithms {text!r}: all stands alone; valid: all, or {', '.join(ALGORITHMS)}")
        try:
            found = read_candidate(word)
        except ConfigError as error:
            raise ConfigError(f"--algorithms {word}: {error}") from None
        if own is not None and found.algorithm == own.algorithm and not found.options:
            out.append(own)
        else:
            out.append(Wanted(found.algorithm, dict(found.options)))
    return out


def _topology(asked: Asked, default: Topology) -> Topology:
    nodes = default.nodes if asked.nodes is None else asked.nodes
    per = default.ranks_per_node if asked.ranks_per_node is None else asked.ranks_per_node
    if nodes * per > MOST_RANKS:
        raise ConfigError(
            f"--nodes {nodes} --ranks-per-node {per}: {nodes * per:,} ranks; valid: at most {MOST_RANKS:,}; a smaller "
            "system of the same kind shows the same"
        )
    if asked.cluster is None:
        return Topology(nodes, per, default.cluster)
    load_cluster(asked.cluster)  # "" too is no cluster
    return Topology(nodes, per, asked.cluster)


def _batches(asked: Asked, ranks: int, settings: Settings | None) -> tuple[tuple[Documents, ...], str]:
    """The packed batches, and where they are from."""
    count, seed = asked.batches or 1, asked.seed or 0
    if count > MOST_BATCHES:
        raise ConfigError(f"--batches {count}: valid: 1 to {MOST_BATCHES}")
    if asked.lengths is None:
        assert settings is not None
        return _rows(asked, ranks, settings)
    drawing = any(value is not None for value in (asked.tokens_per_rank, asked.batches, asked.seed))
    listed = read_lengths(asked.lengths)
    if listed is not None and not drawing:
        check_size(asked.lengths, listed, ranks)
        return (Documents(listed),), f"the documents of --lengths {shortened(asked.lengths)}"
    if settings is not None and asked.tokens_per_rank is None:
        tokens, why = settings.data.seq_length, "data.seq_length"
    else:
        each = TOKENS_PER_RANK if asked.tokens_per_rank is None else asked.tokens_per_rank
        tokens, why = ranks * each, f"--tokens-per-rank {each}"
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"{why}: {tokens:,} tokens over {ranks:,} ranks; valid: at most {MOST_TOKENS:,} in a batch, which is "
            f"{MOST_TOKENS // ranks:,} for a rank"
        )
    some = sample_lengths(asked.lengths, SAMPLE) if listed is None else listed[listed > 0]
    check_size(asked.lengths, some, ranks, tokens)
    drawn = f"{count} batch{'es' * (count > 1)} of {tokens:,} tokens drawn from {shortened(asked.lengths)}, seed {seed}"
    return draw(asked.lengths, tokens, count, seed), drawn


def _rows(asked: Asked, ranks: int, settings: Settings) -> tuple[tuple[Documents, ...], str]:
    """The first rows of a training."""
    from mindspeed_cp.data import PackedStream, open_corpus

    each = asked.tokens_per_rank
    for switch, value, key, instead in (
        ("--tokens-per-rank", each, "data.seq_length", (each or 0) * ranks),
        ("--seed", asked.seed, "train.seed", asked.seed),
    ):
        if value is not None:
            raise ConfigError(
                f"{switch} {value}: rows are those of the training; give --set {key}={instead}, or --lengths too"
            )
    all_rows = settings.train.global_batch_size
    count = min(all_rows, MOST_ROWS) if asked.batches is None else asked.batches
    stream = PackedStream(open_corpus(settings.data.corpus), settings.data.seq_length, settings.train.seed)
    rows = tuple(row.documents for row in islice(stream, count))
    of = f"the {all_rows} rows" if count == all_rows else f"{count} rows, from the first of the {all_rows}"
    return rows, f"{of} of the first global batch, packed from {settings.data.corpus}"
