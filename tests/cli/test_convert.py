"""`mindspeed-cp convert`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindspeed_cp.cli.main import run
from mindspeed_cp.config import SuiteSettings

LAUNCHES = Path(__file__).parents[1] / "convert" / "launches"
HYBRID = LAUNCHES / "hybrid_two_nodes.sh"


def test_the_output_is_a_settings_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["convert", str(HYBRID)]) == 0
    text = capsys.readouterr().out
    (tmp_path / "suite.yaml").write_text(text)
    suite = SuiteSettings.from_yaml(tmp_path / "suite.yaml")
    assert (suite.algorithm, suite.options, suite.nodes) == ("hybrid", {"ulysses_degree": 4}, 2)
    assert "# setting: --context-parallel-algo hybrid_cp_algo (line 18)\n" in text
    assert "#     becomes: algorithm: hybrid\n" in text
    assert "#     --cp-plan suite.yaml\n" in text


def test_flags_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--context-parallel-size", "4", "--context-parallel-algo", "ulysses_cp_algo", "--lr", "1e-4"]
    assert run(["convert", "--json", "--set", "verify_plans=true", "--", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["context_parallel_suite"] == {"context_parallel_size": 4, "algorithm": "ulysses", "verify_plans": True}
    assert told["flags"][:4] == ["--context-parallel-size", "4", "--lr", "1e-4"]
    assert {"flag", "outcome", "became", "reason", "line"} == set(told["changes"][0])


def test_files_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output, script = tmp_path / "suite.yaml", tmp_path / "new.sh"
    assert run(["convert", str(HYBRID), "--output", str(output), "--script", str(script)]) == 0
    text = capsys.readouterr().out
    assert f"written: {output}\nwritten: {script}\n" in text and not text.startswith("#")
    assert yaml.safe_load(output.read_text())["context_parallel_suite"]["ulysses_degree"] == 4
    old, new = HYBRID.read_text().splitlines(), script.read_text().splitlines()
    assert [line for line in old if line not in new] == [
        "    --attention-mask-type causal",
        "    --context-parallel-algo hybrid_cp_algo",
        '    --ulysses-degree-in-cp "4"',
        'torchrun "${DIST[@]}" pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" --bf16 2>&1 | tee log.txt',
    ]
    (launch,) = (line for line in new if line not in old)
    assert "pretrain_gpt.py --calculate-per-token-loss" in launch and f"--cp-plan {output}" in launch
    assert script.stat().st_mode & 0o777 == HYBRID.stat().st_mode & 0o777


def test_a_refusal_writes_nothing_and_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output, script = tmp_path / "suite.yaml", tmp_path / "new.sh"
    arguments = ["convert", str(LAUNCHES / "adaptive.sh"), "--output", str(output), "--script", str(script)]
    assert run(arguments) == 1
    text = capsys.readouterr().out
    assert "refused: --context-parallel-algo adaptive_cp_algo (line 5)" in text
    assert "instead: --set algorithm=direct" in text and "no settings are written" in text
    assert not output.exists() and not script.exists()
    assert run([*arguments, "--set", "algorithm=direct"]) == 0
    assert SuiteSettings.from_yaml(output).algorithm == "direct" and script.exists()


def test_what_is_not_known_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text("CP=$1\ntorchrun train.py \\\n  --context-parallel-size $CP $MORE --lr $LR --seed 1\n")
    assert run(["convert", str(path)]) == 1
    text = capsys.readouterr().out
    assert "unresolved: --context-parallel-size $1 (line 3)" in text
    assert "give --define 1=VALUE" in text and "$1 (line 1) is not set in the script" in text
    assert "MORE (line 3), LR (line 3)" in text
    assert run(["convert", str(path), "--define", "1=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["context_parallel_suite"]["context_parallel_size"] == 4
    assert told["flags"][:7] == ["--context-parallel-size", "4", "$MORE", "--lr", "$LR", "--seed", "1"]


def test_flags_of_a_branch_are_not_guessed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(
        'ARGS="--context-parallel-size 4"\nif [ $LONG ]; then\n  ARGS="$ARGS --cp-comm-type a2a"\nfi\npython train.py $ARGS\n'
    )
    assert run(["convert", str(path)]) == 2
    assert "--cp-comm-type is given in a branch of the script" in capsys.readouterr().err
    assert run(["convert", str(path), "--define", "ARGS=--context-parallel-size 4 --cp-comm-type a2a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_parallel_suite"]["algorithm"] == "ulysses"


def test_several_launches_need_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    launch = "if x; then\npython a.py --context-parallel-size 2\nelse\npython a.py --context-parallel-size 4\nfi\n"
    path.write_text(launch)
    assert run(["convert", str(path)]) == 2
    assert "at lines 2, 4; choose with --line" in capsys.readouterr().err
    assert run(["convert", str(path), "--line", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_parallel_suite"]["context_parallel_size"] == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give a launch script, or flags behind --"),
        (["missing.sh"], "missing.sh: cannot be read: No such file"),
        (["a.sh", "b.sh"], "give a launch script, or flags behind --"),
        (["--", "--bf16"], "no flag of context parallelism"),
        (["--script", "x.sh", "--", "--context-parallel-size", "2"], "--script: needs a launch script"),
        (["--define", "A=1", "--", "--context-parallel-size", "2"], "--define: needs a launch script"),
        ([str(HYBRID), "--define", "A"], "must be NAME=VALUE"),
        ([str(HYBRID), "--define", "A-B=1"], "must be NAME=VALUE"),
        ([str(HYBRID), "--line", "3"], "no flag of context parallelism in a command at line 3"),
        ([str(HYBRID), "--set", "algorithm=auto"], "mindspeed-cp simulate --choose"),
        ([str(HYBRID), "--set", "no_key=1"], "unknown key"),
        ([str(HYBRID), "--set", "context_parallel_size=4"], "change --context-parallel-size"),
        (["--", "--context-parallel-size", "x"], "must be an integer"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert expected in captured.err


def test_a_flag_that_cannot_be_replaced_alone_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, script = tmp_path / "launch.sh", tmp_path / "new.sh"
    path.write_text("NAME=--cp-comm-type\npython train.py --context-parallel-size 2 $NAME p2p\n")
    assert run(["convert", str(path), "--script", str(script)]) == 2
    assert (
        "the script cannot be rewritten: --cp-comm-type p2p does not stand in it in one place"
        in capsys.readouterr().err
    )
    assert not script.exists()
    path.write_text("python $ENTRY --context-parallel-size 2 --cp-comm-type p2p\n")
    assert run(["convert", str(path), "--script", str(script)]) == 2
    assert "names no training script" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCHES.glob("*.sh")))
def test_lines_fit_80_columns(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(["convert", str(LAUNCHES / name)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 10
    monkeypatch.delenv("COLUMNS")
    run(["convert", str(LAUNCHES / name)])
    words = capsys.readouterr().out.replace("# ", " ").split()
    assert [word for word in " ".join(lines).replace("# ", " ").split() if word != "#"] == [
        w for w in words if w != "#"
    ]


def test_neither_torch_nor_megatron_is_imported() -> None:
    code = (
        "import sys; from mindspeed_cp.cli.main import run; "
        f"assert run(['convert', {str(HYBRID)!r}]) == 0; "
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
