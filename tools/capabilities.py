"""The table of capabilities: combinations of features of attention that are computed exactly, and those that are not.

A cell is an algorithm, a backend of the attention operator, and one value of every feature of attention. It is exact
unless a row of `ATTENTION` (mindspeed_cp/schema/unsupported.py) has its features. Tests run every cell, and
`make docs-tables` writes docs/capabilities.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.plan import MASKS
from mindspeed_cp.schema.unsupported import ATTENTION, UnsupportedAttention, unsupported_attention

#: Implementations of the attention operator.
BACKEND_NAMES = ("cpu", "npu", "cuda")

#: The values of every feature, in the order of the fields of `Cell`.
FEATURES: dict[str, tuple[str, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "backend": BACKEND_NAMES,
    "mask": MASKS,
    "documents": ("packed", "one per row", "trees", "blocks"),
    "window": ("none", "sliding"),
    "bias": ("none", "alibi"),
    "dropout": ("none", "some"),
    "kv_heads": ("as queries", "grouped"),
    "widths": ("equal", "unequal"),
    "keys": ("own", "other"),
}

#: Devices on which "exact" was verified.
_VERIFIED_ON = {
    "cpu": "On CPUs, with gloo between ranks.",
    "npu": "With the real torch-npu and its ProcessGroupHCCL over a stand-in for CANN (tests/host_cann), whose "
    "arithmetic and rules are this project's reading of the vendor's documentation: never on a device. "
    "`mindspeed-cp doctor --device npu` checks a device. Which weights attention dropout drops is drawn from the "
    "device's generator, not from the dropout key, so it depends on ranks and algorithm.",
    "cuda": "On one NVIDIA H200, every rank of a plan one after the other; NCCL between GPUs never. On each commit, "
    "on CPUs, with a test double for torch's flash attention and the torch implementation of this "
    "project's kernel for tiles. `make test-cuda` and `mindspeed-cp doctor --device cuda` check a GPU; the latter "
    "prints which kernel serves what. Dropout is there in bf16 and fp16, for heads of up to 256 channels, and is "
    "drawn from the device's generator as on NPUs.",
}

_LABELS = {
    ("mask", "causal"): "causal mask",
    ("mask", "full"): "full mask",
    ("documents", "packed"): "packed documents of any lengths",
    ("documents", "one per row"): "one document per row",
    ("documents", "trees"): "trees of documents that share prefixes",
    ("documents", "blocks"): "blocks of tokens that see both ways",
    ("window", "sliding"): "sliding window",
    ("bias", "alibi"): "ALiBi",
    ("dropout", "some"): "attention dropout",
    ("kv_heads", "grouped"): "grouped-query and multi-query heads",
    ("widths", "unequal"): "MLA widths (head_dim ≠ head_dim_v)",
    ("keys", "other"): "cross-attention (keys of other lengths)",
}


@dataclass(frozen=True)
class Cell:
    """One combination; `FEATURES` has the values of each field.

    Attributes:
        algorithm: algorithm of the plan.
        backend: backend of the attention operator.
        mask: "causal" or "full".
        documents: "blocks" if some tokens see each other both ways, else "trees" if some documents continue others,
            else "one per row" if all have the same length, else "packed".
        window: "sliding" if the window hides keys that the mask shows, else "none".
        bias: "alibi" or "none".
        dropout: "some" or "none".
        kv_heads: "grouped" if several query heads share a key/value head (also multi-query).
        widths: "unequal" if values and keys differ in width.
        keys: "other" in cross-attention, if keys have other lengths than queries.
    """

    algorithm: str
    backend: str
    mask: str
    documents: str
    window: str
    bias: str
    dropout: str
    kv_heads: str
    widths: str
    keys: str


def all_cells() -> Iterator[Cell]:
    """Return all cells."""
    return (Cell(*values) for values in itertools.product(*FEATURES.values()))


def unsupported(cell: Cell) -> UnsupportedAttention | None:
    """Return the row of the table that is of a cell; None if it is exact."""
    return unsupported_attention(vars(cell))


def capabilities_md() -> str:
    """Return the text of docs/capabilities.md: features by backends, with numbered notes.

    A column stands for all algorithms of a backend; algorithms that differ have columns of their own.
    """
    columns: dict[str, list[str]] = {}
    counts = []
    for backend in BACKEND_NAMES:
        results = [(cell, unsupported(cell)) for cell in all_cells() if cell.backend == backend]
        counts.append(f"{sum(row is None for _, row in results):,} of {len(results):,} on {backend}")
        names: dict[tuple[str, ...], list[str]] = {}
        for name in ALGORITHMS:
            rows = [(cell, row) for cell, row in results if cell.algorithm == name]
            names.setdefault(tuple(_entry(rows, *feature) for feature in _LABELS), []).append(name)
        for entries, algorithms in names.items():
            columns[backend if len(names) == 1 else f"{backend}: {', '.join(algorithms)}"] = list(entries)
    lines = [
        _HEAD,
        f"| | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *(f"| {label} | {' | '.join(row)} |" for label, *row in zip(_LABELS.values(), *columns.values(), strict=True)),
        "",
        *(f"{number}. {row}." for number, row in enumerate(ATTENTION, 1)),
        f"\nThe rows combine freely: of all combinations with an algorithm, {', '.join(counts)} are exact, the others "
        "refused by what the notes say.",
        "\n## Where it was verified\n",
        *(f"- **{backend}**: {text}" for backend, text in _VERIFIED_ON.items()),
    ]
    return "\n".join(lines) + "\n"


def _entry(rows: list[tuple[Cell, UnsupportedAttention | None]], feature: str, value: str) -> str:
    """Return the entry of one algorithm and one value of a feature."""
    results = [row for cell, row in rows if getattr(cell, feature) == value]
    numbers = [number for number, note in enumerate(ATTENTION, 1) if note in results and feature in note.features]
    return ("exact" if None in results else "refused") + (f" ({', '.join(map(str, numbers))})" if numbers else "")


_HEAD = """\
# Capabilities

Made by `make docs-tables` from the table in `mindspeed_cp/schema/unsupported.py`. Settings, plans and backends are
checked against it, and tests walk every cell.

*exact*: out, dq, dk and dv agree with dense attention in fp64, with every algorithm, for any number of ranks (odd ones
too), any number of query heads, and lengths that divide by nothing. A number in brackets is a note: together with
something else the feature is refused, with the message of the note. Every exact cell has [sinks](attention.md#sinks),
and every exact cell without grouped heads has [latents](attention.md#latents).
"""
