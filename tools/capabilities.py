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
    "cpu": "Seen on CPUs, with gloo between ranks.",
    "npu": "Seen with the real torch-npu and its ProcessGroupHCCL over a stand-in for CANN (tests/host_cann), whose "
    "arithmetic and rules are this project's reading of the vendor's documentation: never on a device. "
    "`mindspeed-cp doctor --device npu` checks a device. Which weights attention dropout drops is drawn from the "
    "device's generator, not from the dropout key, so it depends on ranks and algorithm.",
    "cuda": "Seen on one NVIDIA H200, every rank of a plan one after the other; NCCL between GPUs never. Each commit, "
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
    """Return the text of docs/capabilities.md."""
    parts = [_HEAD]
    for backend in BACKEND_NAMES:
        parts += _backend_table(backend)
    return "\n".join(parts) + "\n"


def _backend_table(backend: str) -> list[str]:
    """Return the table of a backend: features by algorithms, equal columns merged, with numbered notes."""
    results = [(cell, unsupported(cell)) for cell in all_cells() if cell.backend == backend]
    notes = [row for row in ATTENTION if any(row is result for _, result in results)]
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in ALGORITHMS:
        rows = [(cell, result) for cell, result in results if cell.algorithm == name]
        columns.setdefault(tuple(_entry(rows, *feature, notes) for feature in _LABELS), []).append(name)
    heads = [", ".join(names) for names in columns.values()]
    exact = sum(result is None for _, result in results)
    return [
        f"## {backend}\n",
        *([f"{_VERIFIED_ON[backend]}\n"] if backend in _VERIFIED_ON else []),
        f"| | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
        *(f"| {label} | {' | '.join(entries)} |" for label, *entries in zip(_LABELS.values(), *columns, strict=True)),
        *(f"\n{number}. Refused: {row}." for number, row in enumerate(notes, 1)),
        f"\nThe rows combine freely: {exact:,} of {len(results):,} combinations are exact"
        + (", the others refused by what the notes say." if notes else "."),
    ]


def _entry(
    rows: list[tuple[Cell, UnsupportedAttention | None]], feature: str, value: str, notes: list[UnsupportedAttention]
) -> str:
    """Return the entry of one algorithm and one value of a feature."""
    results = [row for cell, row in rows if getattr(cell, feature) == value]
    numbers = [number for number, note in enumerate(notes, 1) if note in results and feature in note.features]
    return ("exact" if None in results else "refused") + (f" ({', '.join(map(str, numbers))})" if numbers else "")


_HEAD = """\
# Capabilities

Made by `make docs-tables` from the table in `mindspeed_cp/schema/unsupported.py`. Settings, plans and backends are
checked against it, and tests walk every cell.

*exact*: out, dq, dk and dv agree with dense attention in fp64, for any number of ranks (odd ones too), any number of
query heads, and lengths that divide by nothing. A number in brackets is a note below the table: together with something
else it is refused, with the message that the note quotes. Attention sinks change neither plans nor calls of a backend:
every exact cell has them ([attention](attention.md#sinks)). Nor do latents of multi-head latent attention, which
readers expand: every exact cell without grouped heads has them ([attention](attention.md#latents)).
"""
