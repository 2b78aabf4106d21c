"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting: section.key, or the key alone if one section has it. Repeatable.",
        show_default=False,
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="Document lengths: 700,30,4100; or a file with one per line; or a set such as wikipedia or prolong.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "--cp",
        min=1,
        help="Context-parallel ranks of all nodes. Default: of the settings.",
        show_default=False,
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes. Default: of the settings, or 1.", show_default=False)]
RanksPerNode = Annotated[
    int | None, typer.Option(min=1, help="Ranks of a node. Default: of the settings.", show_default=False)
]
Heads = Annotated[int | None, typer.Option(help="Query heads. Default: of the settings.", show_default=False)]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads. Default: of the settings.", show_default=False)]
Dtype = Annotated[
    str | None,
    typer.Option(help="bf16 or fp32. Default: of the settings, or bf16.", show_default=False),
]
HeadDim = Annotated[int | None, typer.Option(help="Channels of a head. Default: of the settings.", show_default=False)]
