"""`mindspeed-cp lengths`: the documents of a data set, and what context parallelism would gain on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mindspeed_cp.cli.options import AsJson

RANKS = (2, 4, 8, 16)
SAMPLED = 2**16  # documents that stand for a distribution


def lengths(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A data set (Megatron's .idx, a Hugging Face folder, .parquet, .arrow, .jsonl), a file with one "
            "length on a line, or a set such as wikipedia.",
        ),
    ],
    column: Annotated[
        str | None, typer.Option(help="Column of a data set: lengths, lists of tokens, or texts.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for a column of texts.")] = None,
    context: Annotated[
        int, typer.Option(min=64, max=2**26, help="Tokens of a row; longer documents are cut.")
    ] = 131072,
    cluster: Annotated[str, typer.Option(help="A preset, such as a3, or a YAML file.")] = "a2",
    heads: Annotated[int, typer.Option(min=1, max=2**14, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, max=2**14, help="Key/value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=2**14, help="Channels of a head.")] = 128,
    batches: Annotated[int, typer.Option(min=1, max=1000, help="Rows that are drawn and simulated.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first row.")] = 0,
    png: Annotated[Path | None, typer.Option(help="Draw a picture.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show how long documents are, and what context parallelism of 2 to 16 ranks would gain on them (modelled).

    mindspeed-cp lengths data_text_document.idx --cluster a2 --png lengths.png

    mindspeed-cp lengths train.jsonl --column text --tokenizer tokenizer.json
    """
    import json

    from mindspeed_cp.choose.compare import compare_algorithms
    from mindspeed_cp.cli.case import read_case
    from mindspeed_cp.cli.lengths import check_cost, read_lengths
    from mindspeed_cp.cli.options import SimulateOptions
    from mindspeed_cp.data.lengths import sample_lengths
    from mindspeed_cp.report.files import check_output_path, write_png
    from mindspeed_cp.report.lengths import OTHERS, PLACED, LengthReport
    from mindspeed_cp.report.progress import show_progress
    from mindspeed_cp.report.text import print_tables, wrap_text

    if png is not None:
        check_output_path("--png", png, [".png"])
    with show_progress("reading the lengths"):
        listed = read_lengths(source, column, tokenizer)
    documents = sample_lengths(source, SAMPLED, seed) if listed is None else listed[listed > 0]
    comparisons = {}
    for ranks in RANKS:
        options = SimulateOptions(
            lengths=source, column=column, tokenizer=tokenizer, ranks=ranks, cluster=cluster, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, tokens_per_rank=max(1, context // ranks), batches=batches, seed=seed,
            algorithms=",".join((PLACED, *OTHERS)),
        )  # fmt: skip
        case, candidates = read_case(options)
        check_cost(case.batches, ranks, (PLACED, *OTHERS))
        with show_progress(f"simulating {ranks} of up to {RANKS[-1]} ranks"):
            comparisons[ranks] = compare_algorithms(case, candidates)
    report = LengthReport(source, documents, listed is None, context, comparisons)
    if png is not None:
        write_png(report.figure(), png)
    if as_json:
        print(json.dumps({**report.as_dict(), "png": None if png is None else str(png)}, allow_nan=False))
        return 0
    print_tables(report.tables())
    if png is not None:
        print(f"picture: {png}")
    print(wrap_text(report.sentence()))
    return 0
