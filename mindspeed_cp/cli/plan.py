"""`mindspeed-cp plan`: how one packed batch is split over ranks."""

from __future__ import annotations

import json
from dataclasses import replace

from mindspeed_cp.algorithms import AUTO, build_plan
from mindspeed_cp.choose.compare import idle_ranks_note
from mindspeed_cp.cli.case import (
    balance_notes,
    check_lengths_given,
    has_linear_part,
    is_drawn,
    layer_cost,
    read_batches,
    read_options,
    tensor_notes,
)
from mindspeed_cp.cli.lengths import check_cost, simulation_limit
from mindspeed_cp.cli.options import PlanOptions
from mindspeed_cp.config import Settings
from mindspeed_cp.config.derived import rank_attention
from mindspeed_cp.config.settings import make_settings
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import verify_plan
from mindspeed_cp.plan.problem import MASKS
from mindspeed_cp.report.files import write_png
from mindspeed_cp.report.plan import PlanSummary, modelled_rows, modelled_time, plan_tables
from mindspeed_cp.report.progress import show_progress
from mindspeed_cp.report.text import print_tables, wrap_text
from mindspeed_cp.schema.yaml_file import SettingsFile, with_value

#: The settings without a file.
BUILT_IN = """
model: {num_attention_heads: 8, kv_channels: 64}
train: {bf16: true}
context_parallel_suite: {context_parallel_size: 4}
"""


def run(options: PlanOptions) -> int:
    """Build the plan; prove and draw it if asked to; print its tables or its JSON values."""
    if options.mask not in MASKS:
        raise ConfigError(
            f"--mask {options.mask!r}: valid: {', '.join(MASKS)}; for a window: --set model.window_size=[LEFT,0]"
        )
    file = read_options(options, BUILT_IN)
    with show_progress("reading the lengths"):
        settings, documents = _settings_and_documents(options, file)
    attention = replace(rank_attention(settings), mask=options.mask)
    suite = settings.context_parallel_suite
    check_cost([documents], suite.topology.ranks, [suite.algorithm])
    plan_options = settings.plan_options if has_linear_part(file) else suite.options
    with show_progress("building the plan") as say:
        plan = build_plan(documents, suite.topology, attention, suite.algorithm, **plan_options)
        layer = layer_cost(file, settings, attention)
        say("simulating the plan")
        modelled = modelled_time(plan, attention, layer, simulation_limit(plan.documents.lengths, plan.ranks))
        notes = tensor_notes(settings) + balance_notes(settings, "shown is the plan of one replica's row")
        notes += idle_ranks_note(plan)
        if options.verify:
            say("proving the plan")
            verify_plan(plan)
        say("counting tiles")
        summary = PlanSummary(plan, 2 if settings.train.bf16 else 4)
        if summary.counted_ranks < plan.ranks:
            notes.append(
                f"tiles of {summary.counted_ranks} of {plan.ranks} ranks were counted, and stand for their neighbours'"
            )
        counts, tables = summary.as_dict(), plan_tables(summary, modelled_rows(modelled))
        if options.png is not None:
            from mindspeed_cp.report.tile_map import tile_map

            say("drawing the plan")
            write_png(tile_map(summary), options.png)
    if options.as_json:
        png = None if options.png is None else str(options.png)
        print(json.dumps({**counts, **modelled, "notes": notes, "verified": options.verify, "png": png}))
        return 0
    print_tables(tables)
    for note in notes:
        print(wrap_text(f"note: {note}"))
    if options.verify:
        print("proved: every visible pair once, every message matched, no dead-lock")
    if options.png is not None:
        print(f"map of tiles: {options.png}")
    return 0


def _settings_and_documents(options: PlanOptions, file: SettingsFile) -> tuple[Settings, Documents]:
    """Return the settings, and the documents of --lengths or of the first row of a training."""
    check_lengths_given(options, file)
    if options.lengths is not None and not is_drawn(options) and not file.is_override("data.seq_length"):
        file = with_value(file, "data.seq_length", 2)  # nothing holds for rows of a training
    settings = make_settings(file)
    suite = settings.context_parallel_suite
    if suite.algorithm == AUTO:
        location = file.location("context_parallel_suite.algorithm")
        raise ConfigError(
            f"{location}: algorithm auto chooses among plans, and this command shows one; name an algorithm with "
            "--algorithm, or let `mindspeed-cp simulate --choose` find it"
        )
    batches, _ = read_batches(options, suite.context_parallel_size, None if options.config is None else settings)
    return settings, batches[0]
