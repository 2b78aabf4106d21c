"""`mindspeed-cp plan`: how one packed batch is split over ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_cp.cli.options import PlanOptions
from mindspeed_cp.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_cp.config import Settings
    from mindspeed_cp.layout import Documents
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


def plan(options: PlanOptions) -> int:
    """Show how a packed batch is split over ranks: layout, tiles, balance, bytes sent, buffers, modelled time.

    Without a settings file: 4 ranks, 8 heads of 64 channels in bf16, ring.

    mindspeed-cp plan --lengths 700,30,4100 --algorithm hybrid --set ulysses_degree=2 --png map.png
    """
    from mindspeed_cp.algorithms import build_plan
    from mindspeed_cp.cli.case import balance_notes, has_linear_part, layer_cost, read_options
    from mindspeed_cp.cli.lengths import check_memory, read_numbers
    from mindspeed_cp.config.derived import rank_attention
    from mindspeed_cp.layout import Documents
    from mindspeed_cp.report.plan import modelled_time

    if options.mask not in MASKS:
        raise ConfigError(
            f"--mask {options.mask!r}: valid: {', '.join(MASKS)}; for a window: --set model.window_size=[LEFT,0]"
        )
    file = read_options(options, BUILT_IN)
    settings, documents = _settings_and_documents(options, file)
    keys = None
    if options.kv_lengths is not None:
        keys = Documents(read_numbers(options.kv_lengths, f"--kv-lengths {options.kv_lengths!r}"))
    attention = replace(rank_attention(settings), mask=options.mask)
    suite = settings.context_parallel_suite
    check_memory(documents if keys is None else keys, suite.topology.ranks, suite.algorithm)
    plan_options = settings.plan_options if has_linear_part(file) else suite.options
    result = build_plan(documents, suite.topology, attention, suite.algorithm, kv_documents=keys, **plan_options)
    time = modelled_time(result, attention, layer_cost(file, settings, attention), _too_large(result))
    remarks = [*notes(result, plan_options), *balance_notes(settings, "shown is the plan of one replica's row")]
    _write(result, options, 2 if settings.train.bf16 else 4, time, remarks)
    return 0


def _settings_and_documents(options: PlanOptions, file: SettingsFile) -> tuple[Settings, Documents]:
    """Return the settings, and the documents of --tree, of --lengths or of the first row of a training."""
    from mindspeed_cp.cli.case import check_lengths_given, read_batch
    from mindspeed_cp.cli.lengths import read_lengths
    from mindspeed_cp.cli.tree_file import read_trees
    from mindspeed_cp.layout import Documents
    from mindspeed_cp.schema.yaml_file import with_value

    if options.tree is not None and (options.lengths is not None or options.kv_lengths is not None):
        raise ConfigError("--tree is given together with --lengths or --kv-lengths; valid: one of them")
    given: Documents | None = None
    if options.tree is not None:
        given = read_trees(options.tree)
    else:
        check_lengths_given(options, file)
        listed = None if options.lengths is None else read_lengths(options.lengths)
        given = None if listed is None else Documents(listed)
    if given is not None and not file.is_override("data.seq_length"):
        file = with_value(file, "data.seq_length", 2)  # nothing holds for rows of a training
    settings = _make_settings(file)
    return settings, given if given is not None else read_batch(options.config, options.lengths, settings)


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


def _write(
    plan: Plan, options: PlanOptions, bytes_per_element: int, time: ModelledTime, remarks: Sequence[str]
) -> None:
    """Print the tables or the JSON of a plan; prove and draw it if asked to."""
    from mindspeed_cp.plan import verify_plan
    from mindspeed_cp.report.plan import plan_tables, summarize_plan
    from mindspeed_cp.report.text import print_tables, wrap_text

    if options.verify:
        verify_plan(plan)
    summary = summarize_plan(plan, bytes_per_element)
    if options.png is not None:
        from mindspeed_cp.report.tile_map import draw_tile_map

        draw_tile_map(plan, options.png, summary)
    if options.as_json:
        png = None if options.png is None else str(options.png)
        more = {**time.as_dict(), "notes": list(remarks), "verified": options.verify, "png": png}
        print(json.dumps({**summary.as_dict(), **more}))
        return
    print_tables(plan_tables(summary, time))
    for note in remarks:
        print(wrap_text(f"note: {note}"))
    if options.verify:
        print("proved: every visible pair once, every message matched, no dead-lock")
    if options.png is not None:
        print(f"map of tiles: {options.png}")
