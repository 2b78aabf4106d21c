"""Document lengths: draws follow the bins, batches are full, and what is wrong is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.data.lengths import Lengths, length_names, load_lengths, sample_batch, sample_lengths
from mindspeed_cp.errors import ConfigError

NAMES = ("prolong", "wikipedia")


def test_the_distributions_that_are_installed() -> None:
    assert tuple(length_names()) == NAMES


@pytest.mark.parametrize(("name", "mean"), [("wikipedia", 1014), ("prolong", 3052)])
def test_draws_follow_the_bins_and_their_mean_is_that_of_the_source(name: str, mean: float) -> None:
    lengths = load_lengths(name)
    drawn = sample_lengths(name, 400_000, seed=3)
    share, _ = np.histogram(drawn, lengths.edges)
    expected = np.asarray(lengths.percent) / 100
    assert drawn.dtype == np.int64 and share.sum() == len(drawn)
    assert np.abs(share / len(drawn) - expected).max() < 4 * np.sqrt(0.25 / len(drawn))
    assert drawn.mean() == pytest.approx(mean, rel=0.08)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_lengths_and_another_seed_others(name: str) -> None:
    assert np.array_equal(sample_lengths(name, 1000, 1), sample_lengths(name, 1000, 1))
    assert not np.array_equal(sample_lengths(name, 1000, 1), sample_lengths(name, 1000, 2))
    assert len(sample_lengths(name, 0)) == 0


@pytest.mark.parametrize("tokens", [0, 1, 63, 4096, 65536])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_full_to_the_token(name: str, tokens: int) -> None:
    for seed in range(5):
        batch = sample_batch(name, tokens, seed, longest=2000)
        assert batch.sum() == tokens and (batch >= 1).all() and (batch <= 2000).all()
        free = sample_batch(name, tokens, seed)
        count = min(64, max(0, len(free) - 1))  # the last is cut
        assert free.sum() == tokens and np.array_equal(free[:count], sample_lengths(name, 64, seed)[:count])


def test_real_lengths_take_the_place_of_bins(tmp_path: Path) -> None:
    np.savez(tmp_path / "prolong.npz", lengths=np.array([7, 11, 13], np.uint32))
    drawn = sample_lengths("prolong", 1000, folder=tmp_path)
    assert set(drawn) == {7, 11, 13} and drawn.dtype == np.int64
    assert set(sample_lengths(tmp_path / "prolong.npz", 1000)) == {7, 11, 13}
    np.savez(tmp_path / "prolong.npz", lengths=np.array([5]))
    os.utime(tmp_path / "prolong.npz", ns=(1, 1))
    assert set(sample_lengths("prolong", 10, folder=tmp_path)) == {5}, "a file that was changed is read again"
    with pytest.raises(ConfigError, match=r"wikipedia\.npz: no such file; leave the folder out"):
        sample_lengths("wikipedia", 1, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nedges: [1, 10]\npercent: [100]\nmean: 3\n", "mean: unknown key"),
        ("name: x\nedges: [1, 10]\n", "percent: is missing"),
        ("name: x\nedges: [1, 10, 10]\npercent: [50, 50]\n", r":2: edges = \[1, 10, 10\]: must be two or more ascending"),
        ("name: x\nedges: [0, 10]\npercent: [100]\n", "edges = .*from 1"),
        ("name: x\nedges: [1, 10, 20]\npercent: [100]\n", ":3: percent = .*must be 2 shares, one for each bin"),
        ("name: x\nedges: [1, 10, 20]\npercent: [50, 40]\n", "percent = .*must be 100 in all, not 90"),
        ("name: x\nedges: [1, 10, 20]\npercent: [150, -50]\n", "none below 0"),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_file_of_bins_has_key_and_rule(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_lengths(path)


def test_a_file_of_bins_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nedges: [5, 6, 9]\npercent: [25, 75]\n")
    assert load_lengths(str(path)) == Lengths("mine", (5, 6, 9), (25, 75))
    assert set(sample_lengths(path, 1000)) == {5, 6, 7, 8}


def test_the_error_of_a_bad_argument_has_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lengths 'wiki': no such distribution; did you mean wikipedia\?"):
        sample_lengths("wiki", 1)
    with pytest.raises(ConfigError, match="count is -1"):
        sample_lengths("prolong", -1)
    with pytest.raises(ConfigError, match="longest is 0"):
        sample_batch("prolong", 10, longest=0)
    for content in (np.zeros(3, np.int64), np.ones((2, 2), np.int64), np.ones(3), np.zeros(0, np.int64)):
        np.save(tmp_path / f"{content.size}{content.dtype}.npy", content)
        with pytest.raises(ConfigError, match="must be a list of 1 to 16,777,216 whole numbers from 1"):
            load_lengths(tmp_path / f"{content.size}{content.dtype}.npy")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ConfigError, match=r"must be an \.npy file"):
        load_lengths(tmp_path / "text.npz")


def test_damaged_files_of_lengths_are_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1, 100))
    whole = (tmp_path / "a.npy").read_bytes()
    for damage in (
        b"",
        whole[:90],
        whole[:-1],
        whole.replace(b"(99,)", b"(99,("),
        whole.replace(b"(99,), ", b"(-9,), "),
        whole.replace(b"<i8", b"|O1"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + whole[10:],
    ):
        (tmp_path / "a.npy").write_bytes(damage)
        with pytest.raises(ConfigError, match=r"lengths .*a\.npy: "):
            load_lengths(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(whole.replace(b"(99,), }" + b" " * 9, b"(9999999999999,), }"[:17]))
    with pytest.raises(ConfigError, match=r"lengths .*a\.npy: "):
        load_lengths(tmp_path / "a.npy")
    (tmp_path / "b.npy").symlink_to("b.npy")
    with pytest.raises(ConfigError, match="cannot be read: Too many levels of symbolic links"):
        load_lengths(tmp_path / "b.npy")
