"""Command-line options that several commands share, and commands whose options are the fields of a dataclass.

This module imports nothing of the package: `--help` is quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting: section.key, or the key alone if one section has it. Repeatable.",
    ),
]


def _size(what: str) -> Any:
    return typer.Option(min=1, max=2**14, help=f"{what}. Default: of the settings.")


def command_of(kind: type[Any], name: str) -> Callable[..., int]:
    """Return a command for typer: its options are the fields of a dataclass and its help the docstring; it imports
    `mindspeed_cp.cli.<name>` when it is called, and calls `run` there."""
    hints = get_type_hints(kind, include_extras=True)

    def command(**values: Any) -> int:
        return int(import_module(f"mindspeed_cp.cli.{name}").run(kind(**values)))

    command.__name__, command.__doc__ = name, kind.__doc__
    command.__annotations__ = {field.name: hints[field.name] for field in fields(kind)}
    parameters = [
        inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default, annotation=hints[x.name])
        for x in fields(kind)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True)
class CaseOptions:
    """The options of `plan` and `simulate` that say what is planned and where; None: not given."""

    config: Annotated[
        Path | None, typer.Argument(help="Settings of a training, a YAML file. Default: built-in sizes.")
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Document lengths: 700,30,4100; a file with one per line; a set such as wikipedia; or a data set: "
            "Megatron's .idx, a Hugging Face folder, .parquet, .arrow, .jsonl."
        ),
    ] = None
    column: Annotated[str | None, typer.Option(help="Column of a data set: lengths, lists of tokens, or texts.")] = None
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for a column of texts.")] = None
    one_batch: Annotated[
        bool, typer.Option("--one-batch", help="A file is one batch, and not what batches are drawn from.")
    ] = False
    tokens_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Draw batches of so many tokens a rank. Default for sets: 4096.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of drawn batches. Default: 0.")] = None
    cluster: Annotated[
        str | None,
        typer.Option(help="A preset, such as a3, or a YAML file. Default: of the settings, or a2."),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "--cp", min=1, help="Context-parallel ranks of all nodes. Default: of the settings."),
    ] = None
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes. Default: of the settings, or what the ranks fill.")
    ] = None
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node. Default: of the settings.")] = None
    heads: Annotated[int | None, _size("Query heads")] = None
    kv_heads: Annotated[int | None, _size("Key/value heads")] = None
    head_dim: Annotated[int | None, _size("Channels of a head")] = None
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32. Default: of the settings, or bf16.")] = None
    overrides: Overrides = None
    png: Annotated[Path | None, typer.Option(help="Draw a picture.")] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class PlanOptions(CaseOptions):
    """Show how a packed batch is split over ranks: layout, tiles, balance, bytes sent, buffers, modelled time.

    Without a settings file: 4 ranks, 8 heads of 64 channels in bf16, ring.

    mindspeed-cp plan --lengths 700,30,4100 --algorithm hybrid --set ulysses_degree=2 --cluster a3 --png map.png
    """

    mask: Annotated[str, typer.Option(help="causal or full.")] = "causal"
    algorithm: Annotated[str | None, typer.Option(help="Name, as in the settings; its options are given by --set.")] = (
        None
    )
    verify: Annotated[bool, typer.Option("--verify", help="Prove the plan.")] = False


@dataclass(frozen=True)
class SimulateOptions(CaseOptions):
    """Compare algorithms on documents and a cluster, before anything runs: modelled time of a layer and its parts.

    Without a settings file: one node of the cluster, 32 heads and 8 key/value heads of 128 channels in bf16.

    mindspeed-cp simulate --lengths wikipedia --cluster a2 --nodes 4 --png out.png
    """

    batches: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of batches; the table shows their means. Default: 1.")
    ] = None
    algorithms: Annotated[
        str, typer.Option(help="all, or names with options after colons, such as ring,direct:prefetch=4")
    ] = "all"
    trace: Annotated[Path | None, typer.Option(help="Write timelines for ui.perfetto.dev (JSON).")] = None
    choose: Annotated[
        bool, typer.Option("--choose", help="Try options of all algorithms too, and recommend one in three lines.")
    ] = False
