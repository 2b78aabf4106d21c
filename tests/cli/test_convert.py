"""`mindspeed-cp convert`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


TWO = """MODEL="--num-attention-heads 4"
LONG="--context-parallel-size 4 --cp-comm-type a2a"
if [ $SHORT ]; then
  torchrun a.py --context-parallel-size 2 --cp-comm-type p2p $MODEL
else
  torchrun b.py $LONG $MODEL
fi
"""


@pytest.mark.parametrize(("line", "converted", "other"), [(4, "a.py", "b.py"), (6, "b.py", "a.py")])
def test_one_of_two_launches_is_rewritten(
    line: int, converted: str, other: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, script = tmp_path / "launch.sh", tmp_path / "new.sh"
    path.write_text(TWO)
    assert run(["convert", str(path), "--line", str(line), "--script", str(script)]) == 0
    text = script.read_text()
    assert f"{converted} --calculate-per-token-loss" in text and f"{other} --calculate" not in text
    assert text.count("--cp-comm-type") == 1 and text.count("--cp-plan") == 1


def test_a_launch_that_shares_its_flags_with_another_is_not_rewritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, script = tmp_path / "launch.sh", tmp_path / "new.sh"
    path.write_text("ARGS='--context-parallel-size 4 --cp-comm-type a2a'\npython a.py $ARGS\npython a.py $ARGS --sft\n")
    assert run(["convert", str(path), "--line", "2", "--script", str(script)]) == 2
    assert "cannot be replaced without changing those of another command" in capsys.readouterr().err
    assert not script.exists()


def test_launches_with_the_same_words_are_rewritten_alike(tmp_path: Path) -> None:
    path, script = tmp_path / "launch.sh", tmp_path / "new.sh"
    path.write_text("ARGS='--context-parallel-size 4 --cp-comm-type a2a'\npython a.py $ARGS\npython a.py $ARGS\n")
    assert run(["convert", str(path), "--script", str(script), "--output", str(tmp_path / "suite.yaml")]) == 0
    lines = script.read_text().splitlines()
    assert "a2a" not in lines[0] and lines[1] == lines[2] and lines[1].count("--cp-plan") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--script", "launch.sh"], "--script launch.sh: is the launch script, too"),
        (["--script", "./folder/../launch.sh"], "is the launch script, too"),
        (["--output", "launch.sh"], "--output launch.sh: is the launch script, too"),
        (["--output", "new", "--script", "new"], "--script new: is --output, too"),
    ],
)
def test_no_file_is_written_over_another(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    source = "python a.py --context-parallel-size 4\n"
    (tmp_path / "launch.sh").write_text(source)
    assert run(["convert", "launch.sh", *options]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "launch.sh").read_text() == source and not (tmp_path / "new").exists()


def converted(text: str, *options: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Convert a script that must have no problem, and return what the command prints as JSON."""
    (folder / "launch.sh").write_text(text)
    capsys.readouterr()
    assert run(["convert", str(folder / "launch.sh"), *options, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def row(told: dict[str, Any], flag: str) -> dict[str, Any]:
    (row,) = (row for row in told["changes"] if row["flag"].split()[0] == flag)
    return dict(row)


@pytest.mark.parametrize(
    ("launch", "entry_tokens"),
    [
        ("torchrun -m my.train FLAGS --config model.py", ("--config", "model.py")),
        ("python -u -m my.train FLAGS --config model.py", ("--config", "model.py")),
        ("$PYTHON -m my.train FLAGS --config model.py", ("--config", "model.py")),
        ("python -m torch.distributed.run --module my.train FLAGS", ()),
        ("python -m torch.distributed.launch --nproc_per_node 8 train.py FLAGS --x -m y", ("--x", "-m", "y")),
        ("srun -m block python train.py FLAGS", ()),
    ],
)
def test_the_training_script_or_module_is_the_first(
    launch: str, entry_tokens: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = launch.replace("FLAGS", "--context-parallel-size 8 --cp-comm-type a2a")
    told = converted(text, folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"] == {"context_parallel_size": 8, "algorithm": "ulysses"}
    assert told["flags"][: 2 + len(entry_tokens)] == ["--context-parallel-size", "8", *entry_tokens]


def test_flags_before_the_training_script_are_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text("my_launcher --context-parallel-size 8 --config model.py --cp-comm-type a2a\n")
    assert run(["convert", str(path)]) == 2
    assert (
        "--context-parallel-size stands before the training script, which seems to be model.py"
        in capsys.readouterr().err
    )


def test_words_of_another_shell_are_not_guessed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text("ALGO=a2a\nbash -c 'torchrun a.py --context-parallel-size 4 --cp-comm-type $ALGO'\n")
    assert run(["convert", str(path)]) == 1
    assert "unresolved: --cp-comm-type $ALGO (line 2)" in capsys.readouterr().out
    told = converted(path.read_text(), "--define", "ALGO=a2a", folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"]["algorithm"] == "ulysses"
    text = 'ALGO=a2a\nbash -c "torchrun a.py --context-parallel-size 4 --cp-comm-type $ALGO"\n'
    assert converted(text, folder=tmp_path, capsys=capsys)["context_parallel_suite"]["algorithm"] == "ulysses"


def test_values_that_a_file_may_change_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    launch = "torchrun a.py --context-parallel-size $CP\n"
    told = converted(f"CP=4\nsource model.conf\n{launch}", folder=tmp_path, capsys=capsys)
    assert (
        "line 2 runs what is not read here: see that it sets no other value"
        in row(told, "--context-parallel-size")["reason"]
    )
    told = converted(f"source model.conf\nCP=4\n{launch}", folder=tmp_path, capsys=capsys)
    assert "is not read" not in row(told, "--context-parallel-size")["reason"]


def test_arrays_of_other_files_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = 'source conf.sh\ntorchrun a.py --context-parallel-size 8 "${MODEL_ARGS[@]}"\n'
    told = converted(text, folder=tmp_path, capsys=capsys)
    assert any("MODEL_ARGS (line 2)" in note for note in told["notes"])
    told = converted(text, "--define", "MODEL_ARGS=--cp-comm-type a2a", folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"]["algorithm"] == "ulysses" and not told["notes"]


def test_flags_of_a_branch_that_just_stay_are_no_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = 'A="--context-parallel-size 4"\nif x; then\n  A="$A --recompute-method FLAG"\nfi\npython a.py $A\n'
    told = converted(text.replace("FLAG", "block"), folder=tmp_path, capsys=capsys)
    assert "${A}" in told["flags"] and any("--recompute-method block" in note for note in told["notes"])
    (tmp_path / "launch.sh").write_text(text.replace("FLAG", "block --num-experts 8"))
    assert run(["convert", str(tmp_path / "launch.sh")]) == 2
    assert "--num-experts is given in a branch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processes", "nodes", "told_row"),
    [
        ("--nproc_per_node 8 --nproc_per_node 4", 2, "on nodes of 4"),
        ("--nproc_per_node 4 -m", 2, "on nodes of 4"),
        ("--nproc_per_node 4 --nproc_per_node 8", None, None),
        ("--nproc_per_node $GPUS", None, "cannot be known here; give --set nodes=NUMBER"),
        ("--nproc_per_node gpu", None, "cannot be known here"),
        ("--nproc_per_node ²", None, "cannot be known here"),
    ],
)
def test_nodes_are_those_of_the_launcher(
    processes: str, nodes: int | None, told_row: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = converted(f"torchrun {processes} a.py --context-parallel-size 8\n", folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"].get("nodes") == nodes
    rows = [change["reason"] for change in told["changes"] if change["flag"].startswith("--nproc")]
    assert len(rows) == bool(told_row) and all(str(told_row) in reason for reason in rows)


def test_rows_say_what_a_setting_takes_the_place_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = "torchrun a.py --context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2\n"
    told = converted(text, "--set", "algorithm=ring", folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"]["algorithm"] == "ring"
    algorithm = row(told, "--context-parallel-algo")
    assert (algorithm["outcome"], algorithm["became"]) == ("left out", "")
    assert algorithm["reason"] == "--set algorithm=ring takes its place"


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
