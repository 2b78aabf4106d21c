"""Random problems for plans: documents, attention, and an algorithm with its options."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.plan import ALGORITHMS, LAYOUTS


@dataclass(frozen=True)
class Problem:
    """The input of build_plan."""

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None
    ranks: int
    attention: AttentionConfig

    def plan(self, algorithm: str, **options: object) -> Plan:
        keys = None if self.kv_lengths is None else Documents(self.kv_lengths)
        return build_plan(Documents(self.lengths), Topology(1, self.ranks), self.attention, algorithm, keys, **options)


@st.composite
def problems(draw: st.DrawFn, longest: int = 70) -> Problem:
    """Up to 8 documents on up to 9 ranks; any mask, window, head counts; keys of other lengths under full masks."""
    lengths = tuple(draw(st.lists(st.integers(0, longest), max_size=8)))
    mask = draw(st.sampled_from(["causal", "full"]))
    reach = st.integers(-1, 30)
    window = draw(st.none() | st.tuples(reach, st.just(0) if mask == "causal" else reach))
    kv_heads, shared = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kv_lengths = None
    if mask == "full" and draw(st.booleans()):
        kv_lengths = tuple(draw(st.integers(0, longest)) for _ in lengths)
    alibi = draw(st.booleans())
    attention = AttentionConfig(kv_heads * shared, kv_heads, 8, 8, mask=mask, window=window, alibi=alibi)
    return Problem(lengths, kv_lengths, draw(st.integers(1, 9)), attention)


def options(ranks: int, algorithm: str) -> st.SearchStrategy[dict[str, object]]:
    """Any valid options of an algorithm."""
    divisors = st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])
    of = {
        "layout": st.sampled_from(LAYOUTS),
        "cp_window_size": divisors,
        "ulysses_degree": divisors,
        "prefetch": st.integers(1, 4),
        "routing": st.booleans(),
        "head_split": st.booleans(),
        "remap": st.sampled_from(["off", "auto", "qkv", "hidden"]),
    }
    taken = {"hybrid": ["layout", "ulysses_degree"], "double_ring": ["layout", "cp_window_size"], "ulysses": []}
    taken["direct"] = ["layout", "prefetch"]
    taken["hierarchical"] = ["prefetch", "routing", "head_split", "remap"]
    names = taken.get(algorithm, ["layout"])
    return st.fixed_dictionaries({name: of[name] for name in names})


#: (algorithm, options) that fit a number of ranks.
def choices(ranks: int) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
    return st.sampled_from(list(ALGORITHMS)).flatmap(lambda name: st.tuples(st.just(name), options(ranks, name)))
