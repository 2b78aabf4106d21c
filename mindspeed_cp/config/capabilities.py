"""What is computed exactly and what is refused: one table, for the settings, the documentation and the tests.

A cell of the table is an algorithm, a backend of the attention operator, and one value of every feature of attention.
A cell is exact unless a row of `REFUSALS` names it. The settings are checked against it when they are read, a test
walks every cell, and the documentation is made from it::

    python -m mindspeed_cp.capabilities > docs/capabilities.md

A backend with gaps is a name in `BACKENDS` and its rows in `REFUSALS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import ALGORITHMS, MASKS, AttentionConfig, algorithm_name
from mindspeed_cp.plan.build import CAUSAL_OTHER_KEYS

__all__ = [
    "BACKENDS",
    "FEATURES",
    "REFUSALS",
    "Cell",
    "Refusal",
    "capabilities_md",
    "cells",
    "check",
    "find",
    "refusal",
]

#: Implementations of the attention operator.
BACKENDS = ("cpu", "npu", "cuda")

#: The values of every feature, in the order of the fields of `Cell`.
FEATURES: dict[str, tuple[str, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "backend": BACKENDS,
    "mask": MASKS,
    "documents": ("packed", "one per row"),
    "window": ("none", "sliding"),
    "bias": ("none", "alibi"),
    "dropout": ("none", "some"),
    "kv_heads": ("as queries", "grouped"),
    "widths": ("equal", "unequal"),
    "keys": ("own", "other"),
}

#: What "exact" was seen on.
_SEEN_ON = {
    "cpu": "Seen on CPUs, with gloo between ranks.",
    "npu": "Seen with the real torch-npu and its ProcessGroupHCCL over a stand-in for CANN (tests/host_cann), whose "
    "arithmetic and rules are this project's reading of the vendor's documentation: never on a device. "
    "`mindspeed-cp doctor --device npu` checks a device. Which weights attention dropout drops is drawn from the "
    "device's generator, not from the dropout key, so it depends on ranks and algorithm.",
    "cuda": "Never run on a GPU yet. Plans and calls were seen to agree on CPUs, with a test double in place of "
    "torch's flash attention and with the torch implementation of this project's kernel for tiles. `make test-cuda` "
    "and `mindspeed-cp doctor --device cuda` check a GPU; the latter prints which kernel serves what. Dropout is there "
    "in bf16 and fp16, for heads of up to 256 channels, and is drawn from the device's generator as on NPUs. For "
    "programs that call this package: `mindspeed-cp train` has no GPUs in this version.",
}

_LABELS = {
    ("mask", "causal"): "causal mask",
    ("mask", "full"): "full mask",
    ("documents", "packed"): "packed documents of any lengths",
    ("documents", "one per row"): "one document per row",
    ("window", "sliding"): "sliding window",
    ("bias", "alibi"): "ALiBi",
    ("dropout", "some"): "attention dropout",
    ("kv_heads", "grouped"): "grouped-query and multi-query heads",
    ("widths", "unequal"): "MLA widths (head_dim ≠ head_dim_v)",
    ("keys", "other"): "cross-attention (keys of other lengths)",
}


@dataclass(frozen=True)
class Cell:
    """One combination; each field has one of the values of the same name in `FEATURES`.

    Attributes:
        algorithm: the plan's.
        backend: of the attention operator.
        mask: "causal" or "full".
        documents: "one per row": all documents are equally long; "packed": they are not.
        window: "sliding" where the window hides something that the mask shows.
        bias: "alibi" or "none".
        dropout: "some" or "none".
        kv_heads: "grouped" where several query heads read one (also multi-query).
        widths: "unequal" where values are of another width than keys.
        keys: "other" in cross-attention, where keys have other lengths than queries.
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
    """Cells that are refused, and what to say.

    Attributes:
        where: the cells: all that have these values.
        says: the setting, its value, and why.
        valid: valid values, or what to use instead.
    """

    where: Mapping[str, str]
    says: str
    valid: str

    def holds(self, cell: Cell) -> bool:
        """Whether the cell is one of them."""
        return all(getattr(cell, name) == value for name, value in self.where.items())

    def __str__(self) -> str:
        return f"{self.says}; valid: {self.valid}"


REFUSALS = (
    Refusal(
        {"mask": "causal", "keys": "other"},
        *CAUSAL_OTHER_KEYS,
    ),
    Refusal(
        {"backend": "cuda", "bias": "alibi", "dropout": "some"},
        "attention.alibi is given together with attention.dropout, which no kernel of the cuda backend computes",
        "one of the two, or backend cpu or npu",
    ),
)


def cells() -> Iterator[Cell]:
    """All cells."""
    return (Cell(*values) for values in itertools.product(*FEATURES.values()))


def refusal(cell: Cell) -> Refusal | None:
    """Why a cell is refused; None: it is exact."""
    return next((row for row in REFUSALS if row.holds(cell)), None)


def check(
    algorithm: str,
    attention: AttentionConfig,
    documents: Documents | None = None,
    kv_documents: Documents | None = None,
    backend: str = "auto",
) -> None:
    """Raise ConfigError, naming the setting, its value and what is valid, unless all of it is exact; arguments as for
    `find`."""
    row = find(algorithm, attention, documents, kv_documents, backend)
    if row is not None:
        raise ConfigError(str(row))


def find(
    algorithm: str,
    attention: AttentionConfig,
    documents: Documents | None = None,
    kv_documents: Documents | None = None,
    backend: str = "auto",
) -> Refusal | None:
    """Why something is refused; None: it is exact.

    Args:
        algorithm: under any of its names.
        attention: what one layer computes.
        documents: the batch; None: any, so that a refusal of some documents counts.
        kv_documents: lengths of the keys, where they are not those of the queries.
        backend: of the attention operator; "auto": refused only where all backends refuse.

    Raises:
        ConfigError: there is no such algorithm or backend.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; valid: auto, {', '.join(BACKENDS)}")
    grouped, unequal = attention.kv_heads != attention.heads, attention.head_dim != attention.head_dim_v
    other = kv_documents is not None and kv_documents != documents
    values = {
        "algorithm": (algorithm_name(algorithm),),
        "mask": (attention.mask,),
        "documents": FEATURES["documents"] if documents is None else (_kind(documents),),
        "window": ("none" if attention.window is None else "sliding",),
        "bias": ("none" if attention.slopes is None else "alibi",),
        "dropout": ("some" if attention.dropout else "none",),
        "kv_heads": ("grouped" if grouped else "as queries",),
        "widths": ("unequal" if unequal else "equal",),
        "keys": ("other" if other else "own",),
    }
    found = []
    for name in BACKENDS if backend == "auto" else (backend,):
        these = itertools.product(*[(name,) if feature == "backend" else values[feature] for feature in FEATURES])
        found.append(next(filter(None, (refusal(Cell(*cell)) for cell in these)), None))
    return found[0] if all(found) else None


def _kind(documents: Documents) -> str:
    return "packed" if len(set(documents.lengths.tolist())) > 1 else "one per row"


def capabilities_md() -> str:
    """The text of docs/capabilities.md."""
    parts = [_HEAD]
    for backend in BACKENDS:
        parts += _backend_table(backend)
    return "\n".join(parts) + "\n"


def _backend_table(backend: str) -> list[str]:
    """A table of features by algorithms; those with equal columns share one, and what is refused is a numbered note."""
    mine = [(cell, refusal(cell)) for cell in cells() if cell.backend == backend]
    notes = [row for row in REFUSALS if any(row is found for _, found in mine)]
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in ALGORITHMS:
        rows = [(cell, found) for cell, found in mine if cell.algorithm == name]
        columns.setdefault(tuple(_entry(rows, *feature, notes) for feature in _LABELS), []).append(name)
    heads = [", ".join(names) for names in columns.values()]
    exact = sum(found is None for _, found in mine)
    return [
        f"## {backend}\n",
        *([f"{_SEEN_ON[backend]}\n"] if backend in _SEEN_ON else []),
        f"| | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
        *(f"| {label} | {' | '.join(entries)} |" for label, *entries in zip(_LABELS.values(), *columns, strict=True)),
        *(f"\n{number}. Refused: {row}." for number, row in enumerate(notes, 1)),
        f"\nThe rows combine freely: {exact:,} of {len(mine):,} combinations are exact"
        + (", the others refused by what the notes say." if notes else "."),
    ]


def _entry(rows: list[tuple[Cell, Refusal | None]], feature: str, value: str, notes: list[Refusal]) -> str:
    """What stands in the table for one algorithm and one value of a feature."""
    found = [row for cell, row in rows if getattr(cell, feature) == value]
    own = [number for number, note in enumerate(notes, 1) if note in found and feature in note.where]
    return ("exact" if None in found else "refused") + (f" ({', '.join(map(str, own))})" if own else "")


_HEAD = """\
# Capabilities

Made by `python -m mindspeed_cp.capabilities > docs/capabilities.md` from the table in `mindspeed_cp/capabilities.py`.
The settings are checked against that table when they are read, and tests walk every cell of it.

*exact*: out, dq, dk and dv agree with dense attention in fp64, for any number of ranks (odd ones too), any number of
query heads, and lengths that divide by nothing. A number in brackets is a note below the table: together with something
else it is refused, with the message that the note quotes.
"""


if __name__ == "__main__":
    print(capabilities_md(), end="")
