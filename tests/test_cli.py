"""The command line: what it prints, that bad input is one line and exit code 2, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.cli import run

ROOT = Path(__file__).parent.parent


def failure(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Run a command that must fail: its one line."""
    assert run([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def test_plan_prints_layout_tiles_and_balance(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--lengths", "5000,37,1200", "--cp", "4"]) == 0
    text = capsys.readouterr().out
    for part in ("Plan", "6,237", "Ranks", "Tiles per step", "step 3", "imbalance of attention"):
        assert part in text


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["plan", "--lengths", "5000 37 0 1200", "--nodes", "2", "--ranks-per-node", "3", "--verify", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert (plan["documents"], plan["tokens"], plan["ranks"], plan["verified"]) == (4, 6237, 6, True)
    assert sum(rank["tokens"] for rank in plan["per_rank"]) == 6237
    work = np.array([rank["work"] for rank in plan["per_rank"]])
    assert work.sum() == sum(n * (n + 1) // 2 for n in (5000, 37, 1200))
    assert plan["imbalance"] == pytest.approx(work.sum(1).max() / work.sum(1).mean())


def test_plan_reads_lengths_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [5000, 37, 1200]
    (tmp_path / "a.txt").write_text("5000 37\n1200\n")
    (tmp_path / "a.json").write_text(json.dumps(lengths))
    np.save(tmp_path / "a.npy", np.array(lengths))
    np.savez(tmp_path / "a.npz", other=np.arange(3), lengths=np.array(lengths))
    seen = []
    for name in ("a.txt", "a.json", "a.npy", "a.npz"):
        assert run(["plan", "--lengths-file", str(tmp_path / name), "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    assert seen[0]["tokens"] == 6237 and all(plan == seen[0] for plan in seen)


def test_plan_draws_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.png"
    assert run(["plan", "--lengths", "500,37", "--cp", "3", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan"], "--lengths"),
        (["plan", "--lengths", "5,x"], "'x' is not a length"),
        (["plan", "--lengths", "-5"], "'-5' is not a length"),
        (["plan", "--lengths", ""], "no lengths"),
        (["plan", "--lengths", "99999999999"], "lengths are 0 to 2147483647"),
        (["plan", "--lengths", "5", "--lengths-file", "x"], "not both"),
        (["plan", "--lengths-file", "/no/such/file"], "/no/such/file: no such file"),
        (["plan", "--lengths-file", "/"], "cannot be read"),
        (["plan", "--lengths", "5", "--cp", "0"], "'--cp'"),
        (["plan", "--lengths", "5", "--cp", "many"], "'--cp'"),
        (["plan", "--lengths", "5", "--cp", "6", "--nodes", "4"], "--cp 6"),
        (
            ["plan", "--lengths", "5", "--cp", "6", "--nodes", "2", "--ranks-per-node", "2"],
            "2 x --ranks-per-node 2 = 4",
        ),
        (["plan", "--lengths", "5", "--kv-heads", "3"], "kv_heads is 3"),
        (["plan", "--lengths", "5", "--mask", "diagonal"], "valid: causal, full"),
        (["plan", "--lengths", "5", "--algorithm", "ulysses"], "valid in this version: ring"),
        (["plan", "--lengths", "5", "--option", "layout"], "must be KEY=VALUE"),
        (["plan", "--lengths", "5", "--option", "layout=diagonal"], "zigzag"),
        (["plan", "--lengths", "5", "--png", "/no/such/folder/x.png"], "cannot be written"),
        (["plan", "--lengths", "5", "--unknown"], "--unknown"),
        (["plan", "surplus"], "surplus"),
        (["plna"], "plna"),
        (["train"], "config"),
        (["train", "/no/such.yaml"], "no such file"),
        (["train", "configs/reference.yaml", "--set", "train.lrr=1"], "did you mean train.lr?"),
        (["train", "configs/reference.yaml", "--nproc", "0"], "0 ranks do not fit"),
        (["train", "configs/reference.yaml", "--nproc", "x"], "'--nproc'"),
        (
            [
                "train",
                "configs/reference.yaml",
                "--set",
                "context_parallel_suite.context_parallel_size=4",
                "--nproc",
                "6",
            ],
            "6 ranks",
        ),
        (["train", "configs/reference.yaml", "--set", "data.corpus=/no/corpus"], "/no/corpus"),
        (["train", "configs/reference.yaml", "--set", "data.seq_length=900000000"], "does not fit"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert expected in failure(capsys, *arguments)


def test_broken_yaml_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("train:\n  lr: [1\n")
    assert f"{path}:3:1: not valid YAML" in failure(capsys, "train", path)


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["train"], ["plan"], ["doctor"]):
        assert run([*command, "--help"]) == 0
        assert "Usage: mindspeed-cp" in capsys.readouterr().out


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "train" in capsys.readouterr().out


def test_help_and_plan_import_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys; from mindspeed_cp.cli import run\n"
        "assert run(['--help']) == 0 and run(['train', '--help']) == 0\n"
        "assert run(['plan', '--lengths', '50,3', '--verify']) == 0\n"
        "heavy = {'torch', 'matplotlib', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_doctor_finds_the_cpu_operator_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["backends"]["cpu"] == {"available": True, "why": None}
    checked = {(check["backend"], check["dtype"]) for check in report["checks"]}
    assert {("cpu", "fp32"), ("cpu", "bf16")} <= checked
    for check in report["checks"]:
        assert set(check["differences"]) == {"out", "lse", "dq", "dk", "dv"}
        assert 0 < max(check["differences"].values()) <= check["limit"]
    for name, backend in report["backends"].items():
        assert backend["available"] or backend["why"], name
    assert run(["doctor"]) == 0
    assert "ok: all" in capsys.readouterr().out


def test_doctor_says_so_when_the_operator_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from mindspeed_cp import doctor

    true_backward = doctor.attention_backward

    def wrong(*arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = true_backward(*arguments, **options)  # type: ignore[arg-type]
        return dq, dk, dv.index_fill(0, torch.tensor([0]), float("nan"))

    monkeypatch.setattr(doctor, "attention_backward", wrong)
    assert run(["doctor"]) == 1
    assert "FAILED: 8 of 8 checks" in capsys.readouterr().out


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_cp import cli_plan

    def broken(*arguments: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli_plan, "topology", broken)
    with pytest.raises(KeyError, match="a bug"):
        run(["plan", "--lengths", "5"])


@pytest.mark.parametrize("content", [b"", b"no array", b"PK\x03\x04 no archive either"])
def test_files_that_are_no_arrays_are_told_in_one_line(content, tmp_path, capsys):
    for name in ("lengths.npy", "lengths.npz"):
        (tmp_path / name).write_bytes(content)
        assert "is not an array that NumPy can read" in failure(capsys, "plan", "--lengths-file", str(tmp_path / name))


def test_the_version_is_told(capsys):
    from mindspeed_cp import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mindspeed-cp {__version__}\n"
