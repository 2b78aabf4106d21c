"""What `plan` and `simulate` take from their options and a settings file."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.choose.candidates import Candidate, parse_candidate
from mindspeed_cp.choose.compare import SimulationCase
from mindspeed_cp.cli.lengths import (
    SHOWN,
    VALID_LENGTHS,
    draw_batches,
    is_data_set,
    read_lengths,
    simulation_limit,
)
from mindspeed_cp.cli.options import CaseOptions, SimulateOptions
from mindspeed_cp.cluster import LayerCost, load_cluster
from mindspeed_cp.cluster.cluster import DEFAULT_CLUSTER, cluster_of
from mindspeed_cp.config import Settings
from mindspeed_cp.config.candidates import SUITE_SECTION
from mindspeed_cp.config.derived import first_rows, mean_layer_cost, rank_attention, whole_attention
from mindspeed_cp.config.sections import POOL
from mindspeed_cp.config.settings import make_settings, override_settings
from mindspeed_cp.data.lengths import length_names, sample_lengths
from mindspeed_cp.errors import ConfigError, files_at_hand, shortened
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology
from mindspeed_cp.schema.yaml_file import SettingsFile, parse_settings, read_settings_file, with_value

#: The settings without a file.
BUILT_IN = """
model: {{num_attention_heads: 32, kv_channels: 128}}
train: {{bf16: true}}
context_parallel_suite: {{context_parallel_size: {ranks}, cluster: {cluster}, nodes: {nodes}}}
"""

DTYPES = ("bf16", "fp32")
MAX_SAMPLE_ROWS = 8  # default for the rows of a training's first global batch
TOKENS_PER_RANK = 4096  # default for drawn batches
ONE_BATCH = 2**20, 2**15  # tokens, and tokens for each rank, up to which a file is taken as one batch
LENGTH_SAMPLE = 4096  # documents of a distribution by which the number of documents in a batch is estimated


def read_options(options: CaseOptions, built_in: str) -> SettingsFile:
    """Return the settings file, or the built-in settings (YAML), with the values of the options.

    Raises:
        ConfigError: the file or an override is invalid, the numbers of ranks contradict each other, or the sizes of the
            model are not given.
    """
    if options.heads is not None and options.head_dim is None:
        raise ConfigError(f"--heads {options.heads}: needs --head-dim, the channels of a head, such as --head-dim 128")
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {options.dtype!r}: valid: {', '.join(DTYPES)}")
    config = options.config
    file = parse_settings(built_in, "built-in settings") if config is None else read_settings_file(config)
    file = override_settings(file, options.overrides or ())
    for option, key, value in (
        ("--algorithm", f"{SUITE_SECTION}.algorithm", getattr(options, "algorithm", None)),
        ("--cluster", f"{SUITE_SECTION}.cluster", options.cluster),
        ("--heads", "model.num_attention_heads", options.heads),
        ("--kv-heads", "model.num_query_groups", options.kv_heads),
        ("--head-dim", "model.kv_channels", options.head_dim),
        ("--dtype", "train.bf16", None if options.dtype is None else options.dtype == "bf16"),
    ):
        if value is not None:
            file = with_value(file, key, value, option)
    return _with_topology(options, _with_model(options, file))


def _with_model(options: CaseOptions, file: SettingsFile) -> SettingsFile:
    """Return the settings with all sizes that are modelled; the defaults of `train` are no user's model."""
    model, train = (section if isinstance(section := file.data.get(name), dict) else {} for name in ("model", "train"))
    if options.config is None:
        if "ffn_hidden_size" in model and "hidden_size" not in model:
            raise ConfigError("--set model.ffn_hidden_size: needs the other size of linear layers, hidden_size")
        return file
    has_width = "hidden_size" in model or ("kv_channels" in model and not model.get("multi_latent_attention"))
    if "num_attention_heads" not in model or not has_width:
        make_settings(file)  # a misspelled key is the likelier fault
        missing = "model.num_attention_heads" if "num_attention_heads" not in model else "model.hidden_size"
        raise ConfigError(
            f"{options.config}: {missing} is not given, and nothing is modelled by a default; give the section model "
            "(num_attention_heads, num_query_groups, kv_channels, hidden_size, ffn_hidden_size) and train.bf16, or "
            "--heads, --kv-heads, --head-dim and --dtype"
        )
    if "bf16" not in train and file.is_override("model.num_attention_heads"):
        file = with_value(file, "train.bf16", True)
    return file


def _with_topology(options: CaseOptions, file: SettingsFile) -> SettingsFile:
    """Return the settings with --ranks, --nodes and --ranks-per-node; what is not given is kept."""
    ranks, nodes, ranks_per_node = options.ranks, options.nodes, options.ranks_per_node
    if ranks is None and nodes is None and ranks_per_node is None:
        return file
    suite = file.data.get(SUITE_SECTION)
    size, file_nodes = (
        value if type(value := suite.get(key) if isinstance(suite, dict) else None) is int and value > 0 else 1
        for key in ("context_parallel_size", "nodes")
    )
    if ranks is None:
        nodes = nodes or file_nodes
        ranks = nodes * (ranks_per_node or max(1, size // file_nodes))
    elif nodes is None:
        nodes = ranks // ranks_per_node if ranks_per_node else file_nodes
    if ranks_per_node is not None and nodes * ranks_per_node != ranks:
        raise ConfigError(
            f"--ranks {ranks}: differs from --nodes {nodes} x --ranks-per-node {ranks_per_node} = "
            f"{nodes * ranks_per_node}; leave one of them out"
        )
    if ranks % nodes:
        raise ConfigError(f"--ranks {ranks}: must be a multiple of --nodes {nodes}; give --ranks-per-node instead")
    file = with_value(file, f"{SUITE_SECTION}.context_parallel_size", ranks, "--ranks")
    return with_value(file, f"{SUITE_SECTION}.nodes", nodes, "--nodes")


def has_linear_part(file: SettingsFile) -> bool:
    """Return True if the settings give the sizes of the linear part of a layer."""
    model = file.data.get("model")
    return isinstance(model, dict) and "hidden_size" in model


def read_case(options: SimulateOptions) -> tuple[SimulationCase, list[Candidate]]:
    """Return the case and the algorithms that the options and the settings file, if there is one, describe.

    Raises:
        ConfigError: an option or a setting is invalid; one line with its name, value and the valid values.
    """
    file = _read_settings_file(options)
    check_lengths_given(options, file)
    settings = make_settings(file)
    topology = settings.context_parallel_suite.topology
    _check_devices(settings, topology)
    batches, source = read_batches(options, topology.ranks, None if options.config is None else settings)
    if options.lengths is None:
        _check_size("the rows of the training", batches[0].lengths, topology.ranks)
    elif not is_drawn(options):
        _check_size(f"--lengths {shortened(options.lengths, SHOWN)}", batches[0].lengths, topology.ranks)
    attention, suite, sizes = rank_attention(settings), settings.context_parallel_suite, {}
    layer = layer_cost(file, settings, attention)
    if has_linear_part(file):
        sizes = settings.model_sizes | {k: v for k, v in suite.options.items() if k in settings.model_sizes}
    own = None
    if suite.algorithm in ALGORITHMS:  # auto chooses only when the training begins
        own = Candidate(suite.algorithm, tuple((k, v) for k, v in suite.options.items() if k not in sizes))
    case = SimulationCase(
        batches,
        topology,
        attention,
        cluster_of(topology),
        layer,
        source,
        _notes(options, settings, topology),
        sizes,
    )
    return case, read_algorithms(options.algorithms, own)


def layer_cost(file: SettingsFile, settings: Settings, attention: AttentionConfig) -> LayerCost:
    """Return the cost of the linear part of a layer: that of the settings, or of a plain layer with this attention."""
    if has_linear_part(file):
        return mean_layer_cost(settings)
    plain = LayerCost.for_attention(attention, tensor_parallel=settings.train.tensor_model_parallel_size)
    return replace(plain, bytes_per_element=2 if settings.train.bf16 else 4)


def tensor_notes(settings: Settings) -> list[str]:
    """Return a note on the heads of the model and of one of its tensor-parallel ranks, if there are several."""
    whole, part, ranks = whole_attention(settings), rank_attention(settings), settings.train.tensor_model_parallel_size
    if ranks == 1:
        return []
    return [
        f"the model has {whole.heads} heads and {whole.kv_heads} key/value heads; shown is one of {ranks} "
        f"tensor-parallel ranks, which has {part.heads} and {part.kv_heads}"
    ]


def balance_notes(settings: Settings, shown: str) -> list[str]:
    """Return a note if a training with data.balance: pool may have other plans than what is shown."""
    if settings.data.balance != POOL:
        return []
    note = f"data.balance: pool: {shown}; a training chooses replicas or the pool in each step (docs/algorithms.md)"
    return [files_at_hand(note)]


def _read_settings_file(options: SimulateOptions) -> SettingsFile:
    """Return the settings with the options; without a file a node of the cluster, and 8 key/value heads if they divide
    the heads."""
    cluster = load_cluster(DEFAULT_CLUSTER if options.cluster is None else options.cluster)  # refuses ""
    devices, nodes = cluster.ranks_per_node, 1
    if options.ranks is not None and not options.ranks % devices:
        nodes = options.ranks // devices
    file = read_options(options, BUILT_IN.format(ranks=devices * nodes, cluster=DEFAULT_CLUSTER, nodes=nodes))
    if options.config is not None:
        return file
    settings = make_settings(file)
    if 1 < (tensor_ranks := settings.train.tensor_model_parallel_size) <= devices:  # they share the node
        file = read_options(options, BUILT_IN.format(ranks=devices // tensor_ranks, cluster=DEFAULT_CLUSTER, nodes=1))
    if not settings.model.num_attention_heads % 8 and "model.num_query_groups" not in file.lines:
        file = with_value(file, "model.num_query_groups", 8)
    return file


def _check_devices(settings: Settings, topology: Topology) -> None:
    """Raise ConfigError if a node of the cluster has too few devices for context- and tensor-parallel ranks."""
    tensor_ranks, name = settings.train.tensor_model_parallel_size, settings.context_parallel_suite.cluster
    if tensor_ranks == 1 or name is None:
        return
    devices, needed = load_cluster(name).ranks_per_node, topology.ranks_per_node * tensor_ranks
    if needed > devices:
        raise ConfigError(
            f"train.tensor_model_parallel_size = {tensor_ranks}: with {topology.ranks_per_node} context-parallel ranks "
            f"a node, a node needs {needed} devices, and one of {name} has {devices}; give --ranks-per-node "
            f"{max(1, devices // tensor_ranks)} and more --nodes"
        )


def check_lengths_given(options: CaseOptions, file: SettingsFile) -> None:
    """Raise ConfigError unless the documents are given: by --lengths, or by the section data of a settings file."""
    if options.lengths is None and (options.config is None or not file.data.get("data")):
        instead = (
            "give a settings file, or" if options.config is None else f"{options.config} has no section data; give"
        )
        raise ConfigError(f"{instead} --lengths: {VALID_LENGTHS}; sets: {', '.join(length_names())}")


def _notes(options: SimulateOptions, settings: Settings, topology: Topology) -> tuple[str, ...]:
    """Return how the case differs from the training of the settings."""
    model, notes = settings.model, []
    if 0 < model.window_layers < model.num_layers:
        with_window = model.window_layers * 2 >= model.num_layers
        notes.append(
            f"{model.window_layers} of {model.num_layers} layers have a window; simulated is a layer "
            f"{'with' if with_window else 'without'} one"
        )
    if model.recompute_granularity is not None:
        notes.append("forwards that are recomputed are not simulated")
    if model.expert_layers:
        notes.append("experts are counted as a dense FFN of the weights that a token visits, without their all-to-all")
    if topology.cluster is None:
        notes.append(
            f"no cluster is named: speeds are those of {DEFAULT_CLUSTER}, on nodes of {topology.ranks_per_node} ranks"
        )
    notes += tensor_notes(settings)
    notes += balance_notes(settings, "simulated are rows of one replica")
    if options.lengths is None and settings.data.balance == "time":
        notes.append("data.balance lays rows anew over replicas; simulated are rows as they are drawn")
    return tuple(notes)


def read_algorithms(text: str, own: Candidate | None = None) -> list[Candidate]:
    """Parse --algorithms: "all", or names with options, such as ring,direct:prefetch=4:layout=balanced.

    Args:
        text: value of the option.
        own: algorithm of a settings file with its options; it replaces its bare name.

    Raises:
        ConfigError: a name or an option is unknown, or the value of an option is valid for no ranks; lists what is.
    """
    algorithms = []
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"--algorithms {text!r}: names no algorithm; valid: all, or {', '.join(ALGORITHMS)}")
    for word in list(ALGORITHMS) if words == ["all"] else words:
        try:
            candidate = parse_candidate(word)
        except ConfigError as error:
            raise ConfigError(f"--algorithms {word}: {error}") from None
        algorithms.append(own if own is not None and candidate == Candidate(own.algorithm) else candidate)
    return algorithms


def is_drawn(options: CaseOptions) -> bool:
    """Return True if batches are drawn from --lengths; False if it is the batch.

    Raises:
        ConfigError: as :func:`read_lengths`, or both are asked for.
    """
    assert options.lengths is not None
    drawing = [
        f"--{name.replace('_', '-')} {value}"
        for name in ("tokens_per_rank", "seed", "batches")
        if (value := getattr(options, name, None)) is not None
    ]
    is_list = read_lengths(options.lengths, options.column, options.tokenizer) is not None
    if options.one_batch and (drawing or not is_list):
        why = f"{drawing[0]} draws batches" if drawing else f"batches are drawn from {options.lengths}"
        raise ConfigError(f"--one-batch: {why}; leave one of them out")
    return bool(drawing) or not is_list


def read_batches(options: CaseOptions, ranks: int, settings: Settings | None) -> tuple[tuple[Documents, ...], str]:
    """Return the packed batches, and where they come from: --lengths, or the first rows of a training."""
    count, seed = getattr(options, "batches", None) or 1, options.seed or 0
    if options.lengths is None:
        assert settings is not None
        return _rows(options, settings)
    listed = read_lengths(options.lengths, options.column, options.tokenizer)
    text = shortened(options.lengths, SHOWN)
    if listed is not None and not is_drawn(options):
        total = int(listed.sum())
        is_long = total > max(*ONE_BATCH, ONE_BATCH[1] * ranks) and os.path.exists(options.lengths)
        if (is_long or is_data_set(options.lengths)) and not options.one_batch:
            raise ConfigError(
                f"--lengths {text}: has {total:,} tokens in {len(listed):,} documents: a batch, or a data set? Give "
                f"--one-batch, or --tokens-per-rank {TOKENS_PER_RANK}, which draws batches of so many"
            )
        return (Documents(listed),), f"the documents of --lengths {text}, as one batch of {total:,} tokens"
    if settings is not None and options.tokens_per_rank is None:
        tokens, source = settings.data.seq_length, "data.seq_length"
    else:
        tokens_per_rank = TOKENS_PER_RANK if options.tokens_per_rank is None else options.tokens_per_rank
        tokens, source = ranks * tokens_per_rank, f"--tokens-per-rank {tokens_per_rank}"
    sample = sample_lengths(options.lengths, LENGTH_SAMPLE) if listed is None else listed[listed > 0]
    _check_size(f"--lengths {text}, {source}", sample, ranks, tokens)
    drawn = f"{count} batch{'es' * (count > 1)} of {tokens:,} tokens drawn from {text}, seed {seed}"
    return draw_batches(options.lengths if listed is None else listed, tokens, count, seed), drawn


def _check_size(given: str, lengths: np.ndarray, ranks: int, tokens: int | None = None) -> None:
    reason = simulation_limit(lengths, ranks, tokens)
    if reason:
        raise ConfigError(f"{given} over {ranks:,} ranks: {reason}; give fewer or shorter documents, or fewer ranks")


def _rows(options: CaseOptions, settings: Settings) -> tuple[tuple[Documents, ...], str]:
    """Return the first rows of a training."""
    if options.tokens_per_rank is not None or options.seed is not None:
        raise ConfigError(
            "--tokens-per-rank, --seed: the rows come from the training; give --set data.seq_length=... or "
            "train.seed=..., or --lengths too"
        )
    count = getattr(options, "batches", None) or min(settings.train.global_batch_size, MAX_SAMPLE_ROWS)
    rows = tuple(first_rows(settings, count))
    return rows, f"the first {count} row{'s' * (count > 1)} of the training, packed from {settings.data.corpus}"
