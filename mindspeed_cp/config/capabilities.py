"""Table of capabilities: combinations that are computed exactly, and combinations that are refused.

A cell is an algorithm, a backend of the attention operator, and one value of every feature of attention. It is exact
unless a row of `REFUSALS` matches it. Settings are checked against the table when they are read, tests run every cell,
and `make docs-tables` writes docs/capabilities.md from it.

A backend that refuses something is a name in `BACKEND_NAMES` with rows in `REFUSALS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_cp.algorithms import ALGORITHMS, algorithm_name
from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import MASKS, AttentionConfig
from mindspeed_cp.plan.problem import BLOCKS_OF, CAUSAL_CROSS_ATTENTION, TREES_OF

__all__ = [
    "BACKEND_NAMES",
    "FEATURES",
    "REFUSALS",
    "Cell",
    "Refusal",
    "all_cells",
    "capabilities_md",
    "check",
    "find_refusal",
    "refusal",
]

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

#: Kinds of documents without trees and blocks.
_PLAIN = ("packed", "one per row")

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


@dataclass(frozen=True)
class Refusal:
    """Cells that are refused, and the error.

    Attributes:
        where: feature values of the cells.
        reason: the setting, its value, and the cause.
        valid: valid values, or the alternative.
    """

    where: Mapping[str, str]
    reason: str
    valid: str

    def matches(self, cell: Cell) -> bool:
        """Return True if the cell is refused."""
        return all(getattr(cell, name) == value for name, value in self.where.items())

    def __str__(self) -> str:
        return f"{self.reason}; valid: {self.valid}"


REFUSALS = (
    Refusal(
        {"mask": "causal", "keys": "other"},
        *CAUSAL_CROSS_ATTENTION,
    ),
    *(
        Refusal({"documents": kind, feature: value}, f"documents have {what}, with {setting}", valid)
        for kind, what, valid in (("trees", "parents", TREES_OF), ("blocks", "blocks", BLOCKS_OF))
        for feature, value, setting in (("mask", "full", "attention.mask 'full'"), ("bias", "alibi", "attention.alibi"))
        if (kind, feature) != ("trees", "bias")
    ),
    Refusal(
        {"backend": "cuda", "bias": "alibi", "dropout": "some"},
        "attention.alibi is given together with attention.dropout, which no kernel of the cuda backend computes",
        "one of the two, or backend cpu or npu",
    ),
)


def all_cells() -> Iterator[Cell]:
    """Return all cells."""
    return (Cell(*values) for values in itertools.product(*FEATURES.values()))


def refusal(cell: Cell) -> Refusal | None:
    """Return the refusal of a cell; None if it is exact."""
    return next((row for row in REFUSALS if row.matches(cell)), None)


def check(
    algorithm: str,
    attention: AttentionConfig,
    documents: Documents | None = None,
    kv_documents: Documents | None = None,
    backend: str = "auto",
) -> None:
    """Raise ConfigError with the setting, its value and the valid values unless everything is exact.

    See :func:`find_refusal` for the arguments.
    """
    row = find_refusal(algorithm, attention, documents, kv_documents, backend)
    if row is not None:
        raise ConfigError(str(row))


def find_refusal(
    algorithm: str,
    attention: AttentionConfig,
    documents: Documents | None = None,
    kv_documents: Documents | None = None,
    backend: str = "auto",
) -> Refusal | None:
    """Return the refusal of an attention; None if it is exact.

    Args:
        algorithm: any name of an algorithm.
        attention: attention of one layer.
        documents: the batch; None: any batch without trees and blocks, so that a refusal of some of these counts.
        kv_documents: lengths of the keys if they differ from those of the queries.
        backend: backend of the attention operator; "auto": refused if all backends refuse.

    Raises:
        ConfigError: unknown algorithm or backend.
    """
    if backend != "auto" and backend not in BACKEND_NAMES:
        raise ConfigError(f"backend is {backend!r}; valid: auto, {', '.join(BACKEND_NAMES)}")
    cross_attention = kv_documents is not None and kv_documents != documents
    values = {
        "algorithm": (algorithm_name(algorithm),),
        "mask": (attention.mask,),
        "documents": _PLAIN if documents is None else (_kind(documents),),
        "window": ("none" if attention.window is None else "sliding",),
        "bias": ("none" if attention.slopes is None else "alibi",),
        "dropout": ("some" if attention.dropout else "none",),
        "kv_heads": ("grouped" if attention.kv_heads != attention.heads else "as queries",),
        "widths": ("unequal" if attention.head_dim != attention.head_dim_v else "equal",),
        "keys": ("other" if cross_attention else "own",),
    }
    refusals = []
    for name in BACKEND_NAMES if backend == "auto" else (backend,):
        combinations = itertools.product(
            *[(name,) if feature == "backend" else values[feature] for feature in FEATURES]
        )
        refusals.append(next(filter(None, (refusal(Cell(*cell)) for cell in combinations)), None))
    return refusals[0] if all(refusals) else None


def _kind(documents: Documents) -> str:
    if not documents.is_plain:
        return "trees" if documents.blocks is None else "blocks"
    return "packed" if len(set(documents.lengths.tolist())) > 1 else "one per row"


def capabilities_md() -> str:
    """Return the text of docs/capabilities.md."""
    parts = [_HEAD]
    for backend in BACKEND_NAMES:
        parts += _backend_table(backend)
    return "\n".join(parts) + "\n"


def _backend_table(backend: str) -> list[str]:
    """Return the table of a backend: features by algorithms, equal columns merged, refusals as numbered notes."""
    results = [(cell, refusal(cell)) for cell in all_cells() if cell.backend == backend]
    notes = [row for row in REFUSALS if any(row is result for _, result in results)]
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


def _entry(rows: list[tuple[Cell, Refusal | None]], feature: str, value: str, notes: list[Refusal]) -> str:
    """Return the entry of one algorithm and one value of a feature."""
    results = [row for cell, row in rows if getattr(cell, feature) == value]
    numbers = [number for number, note in enumerate(notes, 1) if note in results and feature in note.where]
    return ("exact" if None in results else "refused") + (f" ({', '.join(map(str, numbers))})" if numbers else "")


_HEAD = """\
# Capabilities

Made by `make docs-tables` from the table in `mindspeed_cp/config/capabilities.py`. The settings are checked against
that table when they are read, and tests walk every cell of it.

*exact*: out, dq, dk and dv agree with dense attention in fp64, for any number of ranks (odd ones too), any number of
query heads, and lengths that divide by nothing. A number in brackets is a note below the table: together with something
else it is refused, with the message that the note quotes. Attention sinks change neither plans nor calls of a backend:
every exact cell has them ([attention](attention.md#sinks)). Nor do latents of multi-head latent attention, which
readers expand: every exact cell without grouped heads has them ([attention](attention.md#latents)).
"""
