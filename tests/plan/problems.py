"""Random problems for plans: documents, attention, and an algorithm with its options."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.algorithms import ALGORITHMS, AlgorithmOption, algorithm_options

#: Options with tests of their own: a limit of tokens that most batches exceed, one that multiplies the planning time, and
#: one that goes with the attention.
LEFT_AT_DEFAULT = {"max_seqlen_per_dp_cp_rank", "simulated_placements", "latents"}


@dataclass(frozen=True)
class Problem:
    """The input of build_plan."""

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None
    ranks: int
    attention: AttentionConfig

    def plan(self, algorithm: str, **options: object) -> Plan:
        keys = None if self.kv_lengths is None else Documents(self.kv_lengths)
        if self.attention.latent is not None:
            options = {"latents": "on", **options}
        return build_plan(Documents(self.lengths), Topology(1, self.ranks), self.attention, algorithm, keys, **options)


@st.composite
def problems(draw: st.DrawFn, longest: int = 70) -> Problem:
    """Up to 8 documents on up to 9 ranks; any mask, window, head counts, latents; keys of other lengths under full masks."""
    lengths = tuple(draw(st.lists(st.integers(0, longest), max_size=8)))
    mask = draw(st.sampled_from(["causal", "full"]))
    side = st.integers(-1, 30)
    window = draw(st.none() | st.tuples(side, st.just(0) if mask == "causal" else side))
    kv_heads, shared = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kv_lengths = None
    if mask == "full" and draw(st.booleans()):
        kv_lengths = tuple(draw(st.integers(0, longest)) for _ in lengths)
    alibi = draw(st.booleans())
    latent = (6, 3) if shared == 1 and draw(st.booleans()) else None
    attention = AttentionConfig(kv_heads * shared, kv_heads, 8, 8, mask=mask, window=window, alibi=alibi, latent=latent)
    return Problem(lengths, kv_lengths, draw(st.integers(1, 9)), attention)


def options(ranks: int, algorithm: str) -> st.SearchStrategy[dict[str, object]]:
    """Valid options of an algorithm, as its builder declares them; without those that depend on the model or batch."""
    strategies = {name: values(option, ranks) for name, option in algorithm_options(algorithm).items()}
    return st.fixed_dictionaries({name: strategy for name, strategy in strategies.items() if strategy is not None})


def values(option: AlgorithmOption, ranks: int) -> st.SearchStrategy[object] | None:
    """Valid values of an option; None for one that is left at its default."""
    if option.from_model or option.name in LEFT_AT_DEFAULT:
        return None
    if option.divides_ranks:
        return st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])
    if option.choices:
        return st.sampled_from(option.choices)
    if option.type is bool:
        return st.booleans()
    if option.type is float:
        return st.floats(option.minimum or 0, (option.minimum or 0) + 1)
    assert option.type is int, f"tests/plan/problems.py draws no {option.type.__name__}, for option {option.name}"
    minimum = option.minimum or 0
    return st.integers(minimum, minimum + 3)


#: (algorithm, options) that fit a number of ranks.
def choices(ranks: int) -> st.SearchStrategy[tuple[str, dict[str, object]]]:
    return st.sampled_from(list(ALGORITHMS)).flatmap(lambda name: st.tuples(st.just(name), options(ranks, name)))
