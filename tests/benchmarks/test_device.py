"""The benchmarks of one device run, on a CPU and on next to nothing: no figure of theirs is looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import engine, engine_bytes, host, kernels
from mindspeed_cp import AttentionConfig
from mindspeed_cp.comm.group_transport import GroupTransport
from mindspeed_cp.ops.attention.cpu.backend import CpuAttention

SMALL = ["--heads", "2", "--kv-heads", "2", "--dim", "16", "--repeat", "1"]


def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [*SMALL, "--tokens", "300", "--bias-tokens", "50"]
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", *small, "--json", str(tmp_path / "x.json")])
    kernels.main()
    report = json.loads((tmp_path / "x.json").read_text())
    assert {row["what"] for row in report["attention"]} >= {"ours, causal", "ours, causal, ALiBi"}
    assert len(report["copies"]) == 3 and len(report["bias"]) == 2
    assert {row["what"] for row in report["copies"]} >= {"merge, 1 part", "merge, 2 parts"}
    assert all(row["ms"] > 0 for part in ("copies", "attention", "bias") for row in report[part])


def test_virtual_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [*SMALL, "--virtual-ranks", "2", "--tokens", "256", "--lengths", "100,40,200"]
    monkeypatch.setattr(sys, "argv", ["engine", "--device", "cpu", *small, "--json", str(tmp_path / "x.json")])
    engine.main()
    report = json.loads((tmp_path / "x.json").read_text())
    assert len(report["host"]) == 4 and all(row["us"] > 0 for row in report["host"])
    for title in ("one causal document", "packed, 100,40,200"):
        assert [row["direction"] for row in report[title]] == ["forward", "both"]
        assert all(len(row["rank_ms"]) == 2 and row["efficiency"] > 0 for row in report[title])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_engines_host_time(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs, with every message of its plan; no kernel does."""
    posted: list[int] = []
    post = GroupTransport.post
    monkeypatch.setattr(
        GroupTransport, "post", lambda self, transfers: posted.append(len(transfers)) or post(self, transfers)
    )
    for direction in ("forward", "backward"):
        monkeypatch.setattr(CpuAttention, direction, None)
    rows = host.host_rows(ranks, AttentionConfig(2, 2, 16), torch.device("cpu"), calls=1)
    assert [row["us"] > 0 for row in rows] == [True, True, ranks > 1]
    assert len(posted) >= 21 * 2 * (ranks - 1) and (ranks == 1 or max(posted) >= 4)
    assert not torch.distributed.is_initialized()


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        (engine, "--virtual-ranks 3", "--virtual-ranks is 3; valid: a divisor of --heads 32"),
        (engine, "--device cuda", "only together with --virtual-ranks"),
        (engine, "--virtual-ranks 2 --lengths nowhere", "no such set or file"),
        pytest.param(engine, "--device cuda --virtual-ranks 8", "--device cuda: no CUDA device", marks=NO_GPU),
        pytest.param(kernels, "", "--device cuda: no CUDA device", marks=NO_GPU),
    ],
)
def test_bad_arguments_are_one_line(
    program: ModuleType, words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_engine_bytes(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the kernel for each rank, of all rows: only the redistributions move bytes, each tensor's twice."""
    words = ["--backend", backend, "--ranks", "2", "--tokens", "256", "--lengths", "100,40,116", "--heads", "2"]
    words += ["--kv-heads", "2", "--dim", "64", "--algorithms", "ulysses,ring", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["engine_bytes", *words])
    engine_bytes.main()
    ulysses, ring, *packed = json.loads((tmp_path / "x.json").read_text())
    assert 0 < ulysses["mean"] < 3 and ring["mean"] > 2 and len(packed) == 2


def test_bytes_of_operations() -> None:
    """Views are free, a sum in place reads both and writes one, a gather moves what it returns twice."""
    x, part = torch.zeros(8, 4), torch.zeros(8, 4, dtype=torch.bfloat16)
    for wanted, operation in (
        (0, lambda: x[2:5].transpose(0, 1).reshape(4, 3)),
        (0, lambda: torch.empty(100)),
        (128 + 64 + 128, lambda: x.add_(part)),
        (128 + 64, lambda: x.copy_(part)),
        (128 + 128 + 128, lambda: x.zero_() + 0),
        (2 * 32, lambda: x.index_select(0, torch.tensor([0, 3]))),
        (64 + 64, lambda: x.index_copy_(0, torch.arange(4), torch.ones(4, 4))),
    ):
        with engine_bytes.Bytes() as counted:
            operation()
        moved = sum(
            count
            for name, count in counted.moved.items()
            if not name.startswith(("arange", "lift", "_to_copy", "ones"))
        )
        assert moved == wanted, (wanted, counted.moved)
