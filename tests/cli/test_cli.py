"""The command line: what it prints, that bad input is one line and exit code 2, and what it does not import."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp import AttentionConfig, Documents, Plan, Topology, build_plan
from mindspeed_cp.cli.main import run
from mindspeed_cp.cluster import LayerCost
from mindspeed_cp.report.plan import PlanSummary, modelled_time

ROOT = Path(__file__).parents[2]


def failure(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Run a command that must fail: its one line."""
    assert run([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["plan", "--lengths", "5000 37 0 1200", "--nodes", "2", "--ranks-per-node", "3", "--verify", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert (plan["documents"], plan["tokens"], plan["ranks"], plan["verified"]) == (4, 6237, 6, True)
    assert sum(rank["tokens"] for rank in plan["per_rank"]) == 6237
    work = np.array([rank["work"] for rank in plan["per_rank"]])
    assert work.sum() == 8 * sum(n * (n + 1) // 2 for n in (5000, 37, 1200))
    assert plan["imbalance"] == pytest.approx(work.sum(1).max() / work.sum(1).mean())


def test_plan_names_its_cluster_and_its_modelled_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is that of `simulate` for the same plan."""
    sizes = ["--lengths", "5000,37,1200", "--heads", "8", "--kv-heads", "8", "--head-dim", "64", "--ranks", "4"]
    assert run(["simulate", *sizes, "--cluster", "a3", "--algorithms", "hierarchical", "--json"]) == 0
    expected = next(
        entry for entry in json.loads(capsys.readouterr().out)["algorithms"] if entry["name"] == "hierarchical"
    )
    command = ["plan", *sizes, "--algorithm", "hierarchical", "--cluster", "a3"]
    assert run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] == "a3" and told["modelled"]["left_out"] is None
    assert told["modelled"]["seconds"] == pytest.approx(expected["seconds"])
    assert told["modelled"]["fraction_of_bound"] == pytest.approx(expected["fraction_of_bound"])
    assert run(command) == 0
    text = capsys.readouterr().out
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert f"{1e3 * expected['seconds']:.4f} ms" in rows["a layer, modelled"] and "a3" in rows["cluster"]
    assert f"{100 * expected['fraction_of_bound']:.1f} % of it" in rows["... lower bound"]
    assert run(["plan", "--lengths", "700", "--ranks", "16"]) == 0
    assert "a2 (no cluster is named; nodes of 16 ranks are imagined)" in capsys.readouterr().out
    monkeypatch.setattr("mindspeed_cp.cli.lengths.MAX_SIMULATED_RANKS", 3)
    assert run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] == "a3" and told["modelled"]["seconds"] is None
    assert told["modelled"]["left_out"] == "4 ranks, and at most 3 are simulated"


def test_plan_has_no_time_without_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--lengths", "0,0", "--ranks", "2"]) == 0
    assert "left out: the batch has no tokens" in capsys.readouterr().out


def test_the_bound_of_a_plan_grows_with_the_keys() -> None:
    attention, bounds = AttentionConfig(8, head_dim=64, mask="full"), []
    for keys in (4000, 8000):
        plan = build_plan(Documents([4000]), Topology(1, 4), attention, kv_documents=Documents([keys]))
        modelled = modelled_time(plan, attention, LayerCost.for_attention(attention))["modelled"]
        assert 0 < modelled["bound"] < modelled["seconds"]
        bounds.append(modelled["bound"])
    assert bounds[0] < bounds[1]


@pytest.mark.parametrize(
    ("command", "shown"),
    [("plan", "shown is the plan of one replica's row"), ("simulate", "simulated are rows of one replica")],
)
def test_commands_that_have_no_pool_say_what_they_show(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = str(Path(__file__).parents[2] / "configs" / "pool.yaml")
    note = f"data.balance: pool: {shown}; a training chooses replicas or the pool in each step (docs/algorithms.md)"
    assert run([command, file]) == 0
    assert f"note: {note}" in capsys.readouterr().out.splitlines()
    assert run([command, file, "--json"]) == 0
    assert note in json.loads(capsys.readouterr().out)["notes"]
    assert run([command, file, "--set", "data.balance=none"]) == 0
    assert "data.balance" not in capsys.readouterr().out


def test_plan_reads_lengths_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [5000, 37, 1200]
    (tmp_path / "a.txt").write_text("5000 37\n1200\n")
    (tmp_path / "a.json").write_text(json.dumps(lengths))
    np.save(tmp_path / "a.npy", np.array(lengths))
    np.savez(tmp_path / "a.npz", other=np.arange(3), lengths=np.array(lengths))
    seen = []
    for name in ("a.txt", "a.json", "a.npy", "a.npz"):
        assert run(["plan", "--lengths", str(tmp_path / name), "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    assert seen[0]["tokens"] == 6237 and all(plan == seen[0] for plan in seen)


@pytest.mark.parametrize("algorithm", ["ulysses", "hierarchical", "direct"])
def test_plan_draws_and_prints_bytes(algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.png"
    batch = ["plan", "--lengths", "700,30,4100", "--ranks", "4", "--algorithm", algorithm, "--png", str(path)]
    assert run(batch) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert str(path) in text and "sent in the forward" in text and "buffers backward" in text
    heading = next(line for line in text.splitlines() if "spans" in line)
    assert ("heads" in heading) == (algorithm != "direct")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--algorithm ulysses --heads 3 --head-dim 128", "3 heads are fewer than 4 ranks: 1 of these computes nothing"),
        ("--algorithm ulysses --heads 2 --head-dim 128", "2 heads are fewer than 4 ranks: 2 of these compute nothing"),
        ("--algorithm ulysses --heads 4 --head-dim 128", None),
        ("--algorithm ring", None),
    ],
)
def test_plan_notes_idle_ranks(arguments: str, hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--lengths", "700,30,410", "--ranks", "4", *arguments.split()]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [hint in note for note in notes] == [True] if hint else not notes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--algorithm", "a2a+p2p", "--ranks", "6", "--set", "ulysses_degree=3"],
         lambda d: build_plan(d, Topology(1, 6), AttentionConfig(8, head_dim=64), "hybrid", ulysses_degree=3)),
        (["--algorithm", "double_ring", "--nodes", "2", "--ranks-per-node", "3", "--set", "cp_window_size=2"],
         lambda d: build_plan(d, Topology(2, 3), AttentionConfig(8, head_dim=64), "double_ring", cp_window_size=2)),
        (["--algorithm", "direct", "--set", "layout=balanced", "--set", "prefetch=3"],
         lambda d: build_plan(d, Topology(1, 4), AttentionConfig(8, head_dim=64), "direct", layout="balanced",
                              prefetch=3)),
        (["--algorithm", "hierarchical", "--nodes", "2", "--ranks", "4", "--set", "cluster=h200", "--set", "routing=false",
          "--set", "head_split=false", "--set", "remap=qkv", "--set", "max_seqlen_per_dp_cp_rank=900"],
         lambda d: build_plan(d, Topology(2, 2, "h200"), AttentionConfig(8, head_dim=64), "hierarchical", routing=False,
                              head_split=False, remap="qkv", max_seqlen_per_dp_cp_rank=900)),
        (["--set", "window_size=[50,0]", "--set", "position_embedding_type=alibi", "--set", "attention_dropout=0.1",
          "--kv-heads", "2", "--head-dim", "32"],
         lambda d: build_plan(d, Topology(1, 4), AttentionConfig(8, 2, 32, window=(50, 0), alibi=True, dropout=0.1))),
        (["--mask", "full", "--set", "window_size=[20,0]"],
         lambda d: build_plan(d, Topology(1, 4), AttentionConfig(8, head_dim=64, mask="full", window=(20, 0)))),
        (["configs/hierarchical.yaml", "--set", "head_split=false"],
         lambda d: build_plan(d, Topology(2, 2), AttentionConfig(4, 2, 32), "hierarchical", head_split=False,
                              hidden_size=128, ffn_hidden_size=320)),
        (["configs/mla.yaml"], lambda d: build_plan(d, Topology(1, 4), AttentionConfig(4, 4, 64, 48, latent=(64, 16)), "ring")),
    ],
)  # fmt: skip
def test_plan_options_are_those_of_build_plan(
    arguments: list[str],
    expected: Callable[[Documents], Plan],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(["plan", *arguments, "--lengths", "500 37 120", "--json", "--verify", "--set", "train.bf16=false"]) == 0
    told = json.loads(capsys.readouterr().out)
    counts = {name: value for name, value in told.items() if name not in ("cluster", "modelled", "notes")}
    assert counts == {**PlanSummary(expected(Documents([500, 37, 120])), 4).as_dict(), "verified": True, "png": None}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("plan", "--lengths"),
        ("plan --lengths 5 --cp 0", "'--cp'"),
        ("plan --lengths 5 --ranks many", "'--ranks'"),
        ("plan --lengths 5 --cp 6 --nodes 2 --ranks-per-node 2", "2 x --ranks-per-node 2 = 4"),
        ("plan --lengths 5 --mask window", "--mask 'window': valid: causal, full; for a window: --set"),
        ("plan --lengths 5 --algorithm auto", "--algorithm: algorithm auto chooses among plans"),
        ("plan --lengths 5 --algorithm ring --set prefetch=2", "prefetch = 2: algorithm ring has no such option; algorithms that have it: direct, hierarchical"),
        ("plan --lengths 900,70 --algorithm hierarchical --set max_seqlen_per_dp_cp_rank=200", "valid: max_seqlen_per_dp_cp_rank of 243 or more"),
        ("plan --lengths 9 --ranks 12 --algorithm hierarchical --set cluster=h800", "whose nodes have 8 ranks, but the topology has 12 on a node"),
        ("plan --lengths 5 --set depth=2", "depth: unknown key"),
        ("plan --lengths 5 --png /no/such/folder/x.png", "there is no folder"),
        ("plan --lengths 5 --unknown", "--unknown"),
        ("plan configs/ring.yaml surplus", "surplus"),
        ("plna", "plna"),
        ("train configs/reference.yaml --set train.lrr=1", "did you mean train.lr?"),
        ("train configs/reference.yaml --nproc 0", "0 ranks do not fit"),
        ("train configs/reference.yaml --nproc x", "'--nproc'"),
        ("train configs/reference.yaml --set context_parallel_suite.context_parallel_size=4 --nproc 6", "6 ranks"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert expected in failure(capsys, *shlex.split(arguments))


def test_help_of_every_command_cuts_no_name_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ([], ["train"], ["plan"], ["simulate"], ["calibrate"], ["doctor"]):
        assert run([*command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "Usage: mindspeed-cp" in text and "…" not in text


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mindspeed_cp", "plan", "--lengths", "50,3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] == 53, done.stderr


def test_help_and_plan_import_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys; from mindspeed_cp.cli.main import run\n"
        "assert run(['--help']) == 0 and run(['train', '--help']) == 0\n"
        "assert run(['plan', '--lengths', '50,3', '--verify']) == 0\n"
        "heavy = {'torch', 'matplotlib', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_doctor_finds_the_cpu_operator_right(capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_cp import doctor

    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["backends"]["cpu"] == {"available": True, "why": None}
    checked = {(check["backend"], check["dtype"]) for check in report["checks"]}
    assert {("cpu", "fp32"), ("cpu", "fp16"), ("cpu", "bf16")} <= checked
    for check in report["checks"]:
        assert set(check["differences"]) == {"out", "lse", "dq", "dk", "dv"}
        assert 0 < max(check["differences"].values()) <= check["limit"]
    for name, backend in report["backends"].items():
        assert backend["available"] or backend["why"], name
    doctor.write_report(report, as_json=False)
    assert f"ok: all {3 * len(doctor.SHORT_CASES)} checks" in capsys.readouterr().out


def test_doctor_fails_where_the_operator_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from mindspeed_cp import doctor
    from mindspeed_cp.doctor import operator

    true_backward = operator.attention_backward

    def wrong(*arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = true_backward(*arguments, **options)  # type: ignore[arg-type]
        return dq, dk, dv.index_fill(0, torch.tensor([0]), float("nan"))

    monkeypatch.setattr(operator, "attention_backward", wrong)
    assert run(["doctor"]) == 1
    total = 3 * len(doctor.SHORT_CASES)
    assert f"FAILED: {total} of {total} checks" in capsys.readouterr().out


def test_an_error_that_is_not_the_users_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_cp.cli import plan as cli_plan

    def broken(*arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli_plan, "make_settings", broken)
    with pytest.raises(KeyError, match="a bug"):
        run(["plan", "--lengths", "5"])


def test_the_version_is_printed(capsys):
    from mindspeed_cp import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mindspeed-cp {__version__}\n"


def test_a_shell_completes_commands() -> None:
    words = {"_MINDSPEED_CP_COMPLETE": "complete_bash", "COMP_WORDS": "mindspeed-cp pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_cp"], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["plan"], done.stderr
