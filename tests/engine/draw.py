"""Random problems: for a cell of the table of capabilities, and for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mindspeed_cp import Documents
from mindspeed_cp.algorithms import algorithm_options
from mindspeed_cp.plan import alibi_slopes
from tests.engine.cases import CUT, Case
from tests.plan.problems import LEFT_AT_DEFAULT
from tools import capabilities

#: Widths of q and k, and of v: equal, and as in multi-head latent attention.
EQUAL, UNEQUAL = ((16, 16), (8, 8), (24, 24)), ((192, 128), (24, 16), (16, 40), (9, 7))

#: Query heads and kv heads.
UNGROUPED, GROUPED = ((4, 4), (3, 3), (1, 1), (5, 5)), ((4, 2), (8, 1), (6, 3), (9, 3), (5, 1), (12, 4))


def problem(cell: capabilities.Cell, ranks: int, rng: Random) -> Case:
    """Some problem of that cell."""
    causal = cell.mask == "causal"
    lengths = _lengths(cell.documents != "one per row", rng)
    heads, kv_heads = rng.choice(GROUPED if cell.kv_heads == "grouped" else UNGROUPED)
    head_dim, head_dim_v = rng.choice(UNEQUAL if cell.widths == "unequal" else EQUAL)
    return Case(
        lengths,
        ranks,
        heads,
        kv_heads,
        head_dim,
        head_dim_v,
        mask=cell.mask,
        window=_window(causal, rng) if cell.window == "sliding" else None,
        alibi=_alibi(heads, rng) if cell.bias == "alibi" else False,
        dropout=rng.choice((0.1, 0.5, 0.75)) if cell.dropout == "some" else 0.0,
        scale=rng.choice((None, None, 0.7 * head_dim**-0.5)),
        first_head=0 if cell.bias == "alibi" else rng.choice((0, 0, heads)),
        kv_lengths=_other(lengths, rng) if cell.keys == "other" else None,
        algorithm=cell.algorithm,
        options=_options(cell.algorithm, ranks, rng),
        nodes=rng.choice(_divisors(ranks)),
        dropout_key=(rng.randrange(2**40), rng.randrange(64)),
        seed=rng.randrange(1000),
        parents=parents(len(lengths), rng)
        if cell.documents == "trees" or (cell.documents == "blocks" and rng.random() < 0.3)
        else None,
        blocks=blocks(lengths, rng) if cell.documents == "blocks" else None,
    )


def cell_of(case: Case) -> capabilities.Cell:
    """The cell that a problem belongs to."""
    attention = case.attention
    return capabilities.Cell(
        algorithm=case.algorithm,
        backend="cpu",
        mask=attention.mask,
        documents=kind_of(case.documents),
        window="none" if attention.window is None else "sliding",
        bias="none" if attention.slopes is None else "alibi",
        dropout="some" if attention.dropout else "none",
        kv_heads="as queries" if attention.heads == attention.kv_heads else "grouped",
        widths="equal" if attention.head_dim == attention.head_dim_v else "unequal",
        keys="own" if case.kv_lengths in (None, case.lengths) else "other",
    )


def parents(documents: int, rng: Random) -> tuple[int, ...]:
    """Parents of some trees in preorder; the second document continues the first."""
    out, path = [-1, 0], [0, 1]
    for doc in range(2, documents):
        parent = rng.choice((-1, *path))
        out.append(parent)
        path = [*path[: path.index(parent) + 1 if parent >= 0 else 0], doc]
    return tuple(out[:documents])


def kind_of(documents: Documents) -> str:
    """The name of a batch's documents in the table of capabilities."""
    if not documents.is_plain:
        return "trees" if documents.blocks is None else "blocks"
    return "one per row" if len(set(documents.lengths.tolist())) == 1 else "packed"


def blocks(lengths: Sequence[int], rng: Random) -> tuple[tuple[int, int], ...]:
    """Some blocks, one or more if there is a token; some of them side by side, some of a whole document."""
    out, begin = [], 0
    for length in lengths:
        token, whole = begin, rng.random() < 0.2
        while token < begin + length:
            stop = begin + length if whole else token + rng.randint(1, begin + length - token)
            if whole or rng.random() < 0.5:
                out.append((token, stop))
            token = stop
        begin += length
    first = next((sum(lengths[:i]) for i, length in enumerate(lengths) if length), None)
    return tuple(out) if out or first is None else ((first, first + 1),)


def _lengths(packed: bool, rng: Random) -> tuple[int, ...]:
    """Ragged lengths with empty and tiny documents among them, some batches smaller than the ranks; or equal ones."""
    if not packed:
        return (rng.choice((1, 7, 33, 96)),) * rng.choice((1, 1, 2, 3))
    most = rng.choice((3, 40, 120))
    lengths = [rng.randint(0, most) for _ in range(rng.randint(2, 6))]
    return (*lengths, max(lengths) + rng.randint(1, 9))


def _other(lengths: tuple[int, ...], rng: Random) -> tuple[int, ...]:
    """Other lengths, some of them none."""
    other = [rng.choice((0, n, 2 * n + 3, rng.randint(0, 80))) for n in lengths]
    other[rng.randrange(len(other))] = max(lengths) + rng.randint(1, 30)
    return tuple(other)


def _window(causal: bool, rng: Random) -> tuple[int, int]:
    left = rng.choice((0, 1, 5, 17, 40))
    if causal:
        return left, rng.choice((0, -1))
    return rng.choice(((left, rng.choice((0, 2, 11, 30))), (left, -1), (-1, left)))


def _alibi(heads: int, rng: Random) -> bool | tuple[float, ...]:
    """The paper's slopes for these heads, or the slice of a tensor-parallel rank."""
    return True if rng.random() < 0.5 else tuple(alibi_slopes(3 * heads)[heads : 2 * heads].tolist())


def _options(algorithm: str, ranks: int, rng: Random) -> tuple[tuple[str, object], ...]:
    """Each option at its default, or at another value."""
    drawn: dict[str, object] = {}
    for name, option in algorithm_options(algorithm).items():
        if option.from_model or name in {*LEFT_AT_DEFAULT, "reduce_dtype"}:  # it rounds: test_reduce_dtype.py
            continue
        if option.divides_ranks:
            drawn[name] = rng.choice((None, *_divisors(ranks)))
        elif option.choices:
            drawn[name] = rng.choice([choice for choice in option.choices if choice != "hidden"])
        elif option.type is bool:
            drawn[name] = rng.random() < 0.7
        else:
            drawn[name] = rng.choice((option.default, 1, 2, 5))
    if algorithm == "hierarchical" and rng.random() < 0.5:
        return (*{**drawn, "head_split": False}.items(), CUT)
    return tuple(drawn.items())


def _divisors(ranks: int) -> list[int]:
    return [d for d in range(1, ranks + 1) if ranks % d == 0]
