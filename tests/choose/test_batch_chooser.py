"""The choice for single batches by closed forms, held to simulations."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Topology, build_plan, load_cluster, simulate_plan
from mindspeed_cp.choose.batch_chooser import CACHED_CHOICES, BatchChooser, shortlist
from mindspeed_cp.choose.candidates import Candidate, default_candidates
from mindspeed_cp.choose.choose import choose_algorithm
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.errors import ConfigError

MHA = AttentionConfig(heads=32, head_dim=128)


def mixed(number: int, tokens: int) -> Documents:
    """Batches of four kinds."""
    if number % 4 == 2:
        return Documents([512] * (tokens // 512))
    if number % 4 == 3:
        return Documents([tokens])
    return Documents(sample_batch(("wikipedia", "prolong")[number % 4], tokens, number))


@pytest.mark.parametrize("name", ["a2", "h200"])
def test_batches_get_nearly_the_fastest_and_together_gain_over_one_for_all(name: str) -> None:
    topology, cluster = Topology(1, 8, name), load_cluster(name)
    sample = [mixed(number, 8 * 4096) for number in range(4)]
    candidates = default_candidates(topology, MHA)[1:]  # without hierarchical, which decides for each batch itself
    decision = choose_algorithm(sample, topology, MHA, candidates=candidates)
    chooser = BatchChooser(shortlist(decision), sample, topology, MHA)
    assert chooser.candidates[0] == decision.candidate and 2 <= len(chooser.candidates) <= 4
    chosen, best, one_for_all = 0.0, 0.0, 0.0
    for number in range(4, 12):
        batch = mixed(number, 8 * 4096)
        seconds = {}
        for candidate in chooser.candidates:
            plan = build_plan(batch, topology, MHA, candidate.algorithm, **dict(candidate.options))
            seconds[candidate] = simulate_plan(plan, cluster).total
        took = seconds[chooser(batch)]
        assert took <= 1.05 * min(seconds.values())
        chosen, best = chosen + took, best + min(seconds.values())
        one_for_all += seconds[decision.candidate]
    assert best <= chosen < one_for_all


def test_estimates_are_near_the_simulation_for_windows_and_options_too() -> None:
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128, window=(2000, 0))
    topology, cluster = Topology(2, 4, "a3"), load_cluster("a3")
    among = [
        Candidate("ring"),
        Candidate("hybrid", (("ulysses_degree", 2),)),
        Candidate("hybrid"),
        Candidate("ulysses"),
        Candidate("direct", (("layout", "balanced"),)),
        Candidate("double_ring"),
    ]
    sample = [Documents(sample_batch("prolong", 8 * 4096, seed)) for seed in range(3)]
    chooser = BatchChooser(among, sample, topology, attention)
    batch = Documents(sample_batch("prolong", 8 * 4096, 7))
    for candidate, estimated in chooser.estimates(batch).items():
        plan = build_plan(batch, topology, attention, candidate.algorithm, **dict(candidate.options))
        assert estimated == pytest.approx(simulate_plan(plan, cluster).total, rel=0.25), candidate


def test_choices_are_kept_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(1, 4, "a2")
    chooser = BatchChooser([Candidate("ring"), Candidate("ulysses")], [Documents([4096])], topology, MHA)
    counted = []
    real = BatchChooser.estimates
    monkeypatch.setattr(BatchChooser, "estimates", lambda self, batch: counted.append(batch) or real(self, batch))
    for length in [*range(100, 100 + CACHED_CHOICES), 100, 100 + CACHED_CHOICES, 101, 100]:
        chooser(Documents([length]))
    # the last two: 101 went when a place was needed, 100 had been asked for later
    assert [int(batch.lengths[0]) for batch in counted] == [
        *range(100, 100 + CACHED_CHOICES),
        100 + CACHED_CHOICES,
        101,
    ]


def test_one_candidate_is_taken_without_a_look_and_none_is_refused() -> None:
    topology = Topology(1, 4, "a2")
    alone = BatchChooser([Candidate("ring")], [Documents([64])], topology, MHA)
    assert alone(Documents(np.array([8, 0, 3]))) == Candidate("ring")
    for among, sample, expected in (([], [Documents([64])], "candidates"), ([Candidate("ring")], [], "sample")):
        with pytest.raises(ConfigError, match=f"{expected}: there is no .* in it"):
            BatchChooser(among, sample, topology, MHA)


def test_the_shortlist_has_neither_slow_nor_equal_ones() -> None:
    among = [
        Candidate("hierarchical"),
        Candidate("hierarchical", (("routing", False),)),
        Candidate("hybrid", (("ulysses_degree", 4),)),
        Candidate("ring"),
    ]
    decision = choose_algorithm([mixed(0, 8 * 4096)], Topology(1, 8, "h200"), MHA, candidates=among)
    candidates = shortlist(decision)
    assert candidates[0] == decision.candidate and among[1] not in candidates and among[2] in candidates
    assert len(shortlist(decision, most=1)) == 1


def simulated(chooser: BatchChooser, batch: Documents, topology: Topology, attention: AttentionConfig) -> list[float]:
    cluster = load_cluster(topology.cluster or "")
    plans = [
        build_plan(batch, topology, attention, candidate.algorithm, **dict(candidate.options))
        for candidate in chooser.candidates
    ]
    return [simulate_plan(plan, cluster).total for plan in plans]


def test_what_plans_send_may_depend_on_the_batch() -> None:
    """Short documents stay whole on a balanced layout: nothing is sent then, and the sample says nothing of that."""
    balanced = (("layout", "balanced"),)
    among = [Candidate("ring", balanced), Candidate("ulysses"), Candidate("hybrid", balanced)]
    topology, long, short = Topology(1, 8, "a2"), Documents([32768]), Documents([512] * 64)
    for sample in ([long], [short], [long, short], [short, long]):
        chooser = BatchChooser(among, sample, topology, MHA)
        for batch in (long, short):
            seconds = simulated(chooser, batch, topology, MHA)
            assert list(chooser.estimates(batch).values()) == pytest.approx(seconds, rel=0.25)
            assert chooser(batch) == among[seconds.index(min(seconds))]


def test_windows_are_simulated_where_the_planner_does_not_look_at_them() -> None:
    attention = AttentionConfig(heads=16, head_dim=128, window=(2000, 0))
    topology = Topology(2, 8, "a800")
    sample = [Documents([65536]), *(Documents(sample_batch("wikipedia", 65536, seed)) for seed in range(3))]
    decision = choose_algorithm(sample, topology, attention)
    chooser = BatchChooser(shortlist(decision), sample, topology, attention)
    for batch in sample:
        seconds = simulated(chooser, batch, topology, attention)
        assert seconds[chooser.candidates.index(chooser(batch))] <= 1.02 * min(seconds)


def test_candidates_beyond_the_memory_are_not_chosen() -> None:
    topology, batch = Topology(1, 8, "a2"), Documents([4096] * 8)
    among = [Candidate("hierarchical"), Candidate("all_gather")]
    with pytest.raises(ConfigError, match=r"all_gather: holds 3\.\d* GiB in one layer; there are 1\.75"):
        BatchChooser(among, [batch], topology, MHA, memory=1.75 * 2**30)
    chooser = BatchChooser(among, [batch], topology, MHA, memory=1.75 * 2**30, drop=True)
    assert chooser.candidates == (among[0],) and chooser(batch) == among[0]
    with pytest.raises(ConfigError, match="all_gather: holds"):
        BatchChooser(among[::-1], [batch], topology, MHA, memory=1.75 * 2**30, drop=True)


def test_batches_without_tokens_take_the_first() -> None:
    among = [Candidate("ring"), Candidate("ulysses")]
    chooser = BatchChooser(among, [Documents([0]), Documents([4096])], Topology(1, 4, "a2"), MHA)
    assert chooser(Documents([])) == chooser(Documents([0, 0])) == among[0]


def test_one_that_cannot_do_a_batch_is_not_chosen_for_it() -> None:
    bounded = Candidate("hierarchical", (("max_seqlen_per_dp_cp_rank", 600),))
    chooser = BatchChooser([bounded, Candidate("a2a")], [Documents([1000, 300])], Topology(1, 4, "a2"), MHA)
    assert chooser.candidates[1] == Candidate("ulysses") and len(chooser.estimates(Documents([1000]))) == 2
    assert chooser(Documents([5000])) == Candidate("ulysses")
    alone = BatchChooser([bounded, bounded], [Documents([1000, 300])], Topology(1, 4, "a2"), MHA)
    assert alone(Documents([5000])) == bounded  # nothing to choose; its plan says why it cannot be made
    both = BatchChooser(
        [bounded, Candidate("hierarchical", (("max_seqlen_per_dp_cp_rank", 700),))],
        [Documents([1000, 300])],
        Topology(1, 4, "a2"),
        MHA,
    )
    with pytest.raises(ConfigError, match="document 0 has 5000 tokens, more than 4 ranks"):
        both(Documents([5000]))
