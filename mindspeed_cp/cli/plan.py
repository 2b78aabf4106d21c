"""`mindspeed-cp plan`: how one packed batch is split over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mindspeed_cp.cli.options import (
    AsJson,
    Dtype,
    HeadDim,
    Heads,
    KvHeads,
    Lengths,
    Nodes,
    Overrides,
    Ranks,
    RanksPerNode,
)
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings
    from mindspeed_cp.plan import Plan
    from mindspeed_cp.report.plan import ModelledTime
    from mindspeed_cp.schema.yaml_file import SettingsFile

MASKS = ("causal", "full")

#: The settings without a file.
BUILT_IN = """
model: {num_attention_heads: 8, kv_channels: 64}
train: {bf16: true}
context_parallel_suite: {context_parallel_size: 4}
"""


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Settings of a training, a YAML file. Default: 4 ranks, 8 heads of 64 channels, ring.",
            show_default=False,
        ),
    ] = None,
    lengths: Lengths = None,
    kv_lengths: Annotated[
        str | None,
        typer.Option(help="Cross-attention: lengths of each document's keys; full mask only.", show_default=False),
    ] = None,
    tree: Annotated[
        Path | None,
        typer.Option(
            help="Documents that continue others: a file of lines with lengths and parents, or with trajectories.",
            show_default=False,
        ),
    ] = None,
    mask: Annotated[str, typer.Option(help="causal or full.")] = "causal",
    ranks: Ranks = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Name, as in the settings; its options are given by --set.", show_default=False),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Prove the plan.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw who computes which tile when.", show_default=False)] = None,
    as_json: AsJson = False,
) -> int:
    """Show how a packed batch is split over ranks: layout, tiles, balance, bytes sent, buffers, modelled time.

    mindspeed-cp plan --lengths 700,30,4100 --algorithm hybrid --set ulysses_degree=2 --png map.png
    """
    from mindspeed_cp.algorithms import build_plan
    from mindspeed_cp.cli.case import balance_notes, check_lengths_given, layer_cost, read_batch
    from mindspeed_cp.cli.command_settings import CommandSettings
    from mindspeed_cp.cli.lengths import check_memory, read_lengths, read_numbers
    from mindspeed_cp.cli.tree_file import read_trees
    from mindspeed_cp.config.derived import rank_attention
    from mindspeed_cp.layout import Documents
    from mindspeed_cp.report.plan import modelled_time
    from mindspeed_cp.schema.yaml_file import with_value

    if mask not in MASKS:
        raise ConfigError(f"--mask {mask!r}: valid: {', '.join(MASKS)}; for a window: --set model.window_size=[LEFT,0]")
    if tree is not None and (lengths is not None or kv_lengths is not None):
        raise ConfigError("--tree is given together with --lengths or --kv-lengths; valid: one of them")
    trees = None if tree is None else read_trees(tree)
    options = CommandSettings(
        config, overrides or (), algorithm, heads, kv_heads, head_dim, None, ranks, nodes, ranks_per_node, dtype
    )
    file = options.read(BUILT_IN)
    if trees is None:
        check_lengths_given(options, file, lengths)
    listed = None if lengths is None else read_lengths(lengths)
    if (listed is not None or trees is not None) and not file.is_override("data.seq_length"):
        file = with_value(file, "data.seq_length", 2)  # nothing holds for rows of a training
    settings = _make_settings(file)
    if trees is not None:
        documents = trees
    else:
        documents = read_batch(config, lengths, settings) if listed is None else Documents(listed)
    keys = None if kv_lengths is None else Documents(read_numbers(kv_lengths, f"--kv-lengths {kv_lengths!r}"))
    attention = replace(rank_attention(settings), mask=mask)
    suite = settings.context_parallel_suite
    check_memory(documents if keys is None else keys, suite.topology.ranks, suite.algorithm)
    plan_options = settings.plan_options if options.has_linear_part(file) else suite.options
    result = build_plan(documents, suite.topology, attention, suite.algorithm, kv_documents=keys, **plan_options)
    time = modelled_time(result, attention, layer_cost(options, file, settings, attention), _too_large(result))
    remarks = [*notes(result, plan_options), *balance_notes(settings, "shown is the plan of one replica's row")]
    write_plan(result, 2 if settings.train.bf16 else 4, time, remarks, verify=verify, png=png, as_json=as_json)
    return 0


def _too_large(plan: Plan) -> str:
    """Return why a plan is not simulated, by the limits of `mindspeed-cp simulate`; empty if it is."""
    from mindspeed_cp.cli.case import MAX_SIMULATED_RANKS
    from mindspeed_cp.cli.lengths import MAX_RING_CHUNKS, MAX_SIMULATED_TOKENS

    chunks = int(plan.documents.lengths.clip(1, 2 * plan.ranks).sum())
    for number, limit, what in (
        (plan.ranks, MAX_SIMULATED_RANKS, "ranks"),
        (plan.documents.tokens, MAX_SIMULATED_TOKENS, "tokens"),
        (chunks, MAX_RING_CHUNKS, "chunks of documents"),
    ):
        if number > limit:
            return f"{number:,} {what}, and at most {limit:,} are simulated"
    return ""


def _make_settings(file: SettingsFile) -> Settings:
    from mindspeed_cp.algorithms import AUTO
    from mindspeed_cp.config.settings import make_settings

    settings = make_settings(file)
    if settings.context_parallel_suite.algorithm == AUTO:
        location = file.location("context_parallel_suite.algorithm")
        raise ConfigError(
            f"{location}: algorithm auto chooses among plans, and this command shows one; name an algorithm with "
            "--algorithm, or let `mindspeed-cp simulate --choose` find it"
        )
    return settings


def notes(plan: Plan, options: Mapping[str, Any]) -> list[str]:
    """Return remarks on a plan that is probably not the one that the user wants."""
    remarks = []
    window = options.get("cp_window_size", plan.topology.ranks_per_node)
    if plan.algorithm == "double_ring" and window == plan.ranks > 1:
        remarks.append(
            "double_ring with one window of all ranks is the ring; give --set cp_window_size=..., or --nodes above 1 "
            "for one window per node"
        )
    idle = int((plan.q_layout_compute.head_counts(plan.attention.heads) == 0).sum())
    if idle:
        remarks.append(
            f"{plan.attention.heads} heads are fewer than {plan.ranks} ranks: {idle} of these "
            f"compute{'s' * (idle == 1)} nothing; hybrid with --set ulysses_degree=... of at most the number of heads "
            "keeps all of them busy"
        )
    return remarks


def write_plan(
    plan: Plan,
    bytes_per_element: int,
    time: ModelledTime,
    remarks: Sequence[str],
    *,
    verify: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Print the tables or the JSON of a plan; prove and draw it if asked to."""
    from mindspeed_cp.report.plan import plan_tables, summarize_plan

    if verify:
        from mindspeed_cp.plan import verify_plan

        verify_plan(plan)
    summary = summarize_plan(plan, bytes_per_element)
    if png is not None:
        from mindspeed_cp.report.tile_map import draw_tile_map

        draw_tile_map(plan, png, summary)
    if as_json:
        more = {**time.as_dict(), "notes": list(remarks), "verified": verify, "png": str(png) if png else None}
        print(json.dumps({**summary.as_dict(), **more}))
        return
    from mindspeed_cp.report.text import print_tables, wrap_text

    print_tables(plan_tables(summary, time))
    for note in remarks:
        print(wrap_text(f"note: {note}"))
    if verify:
        print("proved: every visible pair once, every message matched, no dead-lock")
    if png is not None:
        print(f"map of tiles: {png}")
