"""`mindspeed-cp convert`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
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
    assert "# setting: --context-parallel-algo hybrid_cp_algo\n" in text
    assert "#     becomes: algorithm: hybrid\n" in text
    assert "#     --cp-plan suite.yaml\n" in text


def test_settings_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "suite.yaml"
    assert run(["convert", str(HYBRID), "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert f"written: {output}\n" in text and not text.startswith("#")
    assert yaml.safe_load(output.read_text())["context_parallel_suite"]["ulysses_degree"] == 4
    assert f"--cp-plan {output}" in text


def test_a_refusal_writes_nothing_and_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "suite.yaml"
    assert run(["convert", "--output", str(output), "--", "--context-parallel-algo", "mamba_cp_algo"]) == 1
    text = capsys.readouterr().out
    assert "refused: --context-parallel-algo mamba_cp_algo" in text
    assert "instead: a model of softmax attention in every layer" in text and "no settings are written" in text
    assert not output.exists()


LAUNCH = "torchrun --nproc_per_node 8 pretrain_gpt.py --context-parallel-size 4 "


def converted(
    text: str, *options: str, folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0
) -> dict[str, Any]:
    """Convert a script, and return what the command prints as JSON."""
    (folder / "launch.sh").write_text(text)
    capsys.readouterr()
    assert run(["convert", *options, "--json", str(folder / "launch.sh")]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def error_of(text: str, *options: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert a script that is refused by one line, and return it."""
    (folder / "launch.sh").write_text(text)
    capsys.readouterr()
    assert run(["convert", *options, str(folder / "launch.sh")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def row(told: dict[str, Any], flag: str) -> dict[str, Any]:
    (row,) = (row for row in told["changes"] if row["flag"].split()[0] == flag)
    return dict(row)


@pytest.mark.parametrize(
    ("flags", "outcome", "flag"),
    [
        ("--yaml-cfg a.yaml", "by hand", "--yaml-cfg"),
        ("--is-instruction-dataset", "by hand", "--is-instruction-dataset"),
        ("--spec my.specs layer", "by hand", "--spec"),
        ("--tokenizer-not-use-fast", "by hand", "pretrain_gpt.py"),  # of MindSpeed-LLM
        ("--mystery 1", "unknown", "--mystery"),
    ],
)
def test_work_by_hand_is_not_exit_code_0(
    flags: str, outcome: str, flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = converted(LAUNCH + flags, folder=tmp_path, capsys=capsys, code=3)
    assert row(told, flag)["outcome"] == outcome and told["context_parallel_suite"]["context_parallel_size"] == 4


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("msrun --worker_num 8 pretrain_gpt.py --context-parallel-size 2", "MindSpore"),
        ("torchrun pretrain_gpt.py --context-parallel-size 2 --ai-framework mindspore", "MindSpore"),
        ("torchrun pretrain_gpt.py --context-parallel-size 2 --ai-framework=mindspore", "MindSpore"),
        ("torchrun inference.py --context-parallel-size 2", "inference.py is inference, no training"),
        ("torchrun evaluation.py --context-parallel-size 2", "is evaluation, no training"),
        ("python preprocess_data.py --tokenizer-type X --seq-length 4096", "is preparation of data, no training"),
        ("python convert_ckpt.py --tensor-model-parallel-size 2", "is conversion of checkpoints, no training"),
        ("python a.py --num-layers 2 --load-model-type hf", "is conversion of checkpoints, no training"),
        ("torchrun a.py --num-experts 2 --max-new-tokens 8", "is inference, no training"),
    ],
)
def test_other_work_than_a_training_with_pytorch_is_refused(
    launch: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert words in error_of(launch, folder=tmp_path, capsys=capsys)


def test_a_trainer_that_has_no_place_for_the_lines_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = LAUNCH.replace("pretrain_gpt.py", "posttrain_gpt.py") + "--stage sft"
    told = converted(text, folder=tmp_path, capsys=capsys, code=1)
    script = row(told, "posttrain_gpt.py")
    assert script["outcome"] == "refused" and "planned_batch_from" in script["became"]
    assert told["context_parallel_suite"] is None


def test_the_training_is_chosen_among_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = f"python preprocess_data.py --tokenizer-type X --input a\n{LAUNCH}--cp-comm-type a2a\npython evaluation.py --seq-length 8\n"
    told = converted(text, folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"]["algorithm"] == "ulysses"
    assert told["recorded"] == "torchrun --nproc_per_node 8 pretrain_gpt.py"


def test_several_trainings_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = f"{LAUNCH}--lr 1\n{LAUNCH}--lr 1\n{LAUNCH}--cp-comm-type a2a\n"
    assert "starts 2 trainings, 1: pretrain_gpt.py" in error_of(text, folder=tmp_path, capsys=capsys)


def test_arguments_and_variables_of_the_script(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launch.sh").write_text('python pretrain_gpt.py --context-parallel-size $CP --cp-comm-type "$1" $2')
    monkeypatch.setenv("CP", "4")
    for variable in ("CP", "CP=4"):
        assert run(["convert", "--json", "--env", variable, "--", str(tmp_path / "launch.sh"), "a2a", "--sft"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["context_parallel_suite"] == {"context_parallel_size": 4, "algorithm": "ulysses"}
        assert "--sft" in told["flags"]


def test_a_note_names_programs_whose_values_are_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = converted(f"X=$(python -c 'print(1)')\n{LAUNCH}--lr $X", folder=tmp_path, capsys=capsys)
    assert told["notes"][0].startswith("not run, so that what the script reads from it is empty: python -c print(1)")


def test_an_error_quotes_the_last_message_of_a_script_that_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = error_of(f"set -u\n{LAUNCH}--lr $LR", folder=tmp_path, capsys=capsys)
    assert "starts no program with flags" in error and "LR: unbound variable" in error and "--env NAME=VALUE" in error


@pytest.mark.parametrize(
    ("launch", "entry_words"),
    [
        ("torchrun -m my.train FLAGS --config model.py", ("--config", "model.py")),
        ("python -u -m my.train FLAGS --config model.py", ("--config", "model.py")),
        ("python -m torch.distributed.run --module my.train FLAGS", ()),
        ("python -m torch.distributed.launch --nproc_per_node 8 train.py FLAGS --x -m y", ("--x", "-m", "y")),
        ("srun -m block python train.py FLAGS", ()),
    ],
)
def test_the_training_script_or_module_is_the_first(
    launch: str, entry_words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = launch.replace("FLAGS", "--context-parallel-size 8 --cp-comm-type a2a")
    told = converted(text, folder=tmp_path, capsys=capsys, code=3)
    assert told["context_parallel_suite"] == {"context_parallel_size": 8, "algorithm": "ulysses"}
    assert told["flags"][: 2 + len(entry_words)] == ["--context-parallel-size", "8", *entry_words]


@pytest.mark.parametrize(
    ("processes", "nodes", "told_row"),
    [
        ("--nproc_per_node 8 --nproc_per_node 4", 2, "on nodes of 4"),
        ("--nproc_per_node 4 --nproc_per_node 8", None, None),
        ("--nproc_per_node gpu", None, "not known here; give nodes in the settings"),
        ("--nproc_per_node 3", None, "no whole nodes of 3 processes"),
    ],
)
def test_nodes_are_those_of_the_launcher(
    processes: str, nodes: int | None, told_row: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = f"torchrun {processes} pretrain_gpt.py --context-parallel-size 8\n"
    told = converted(text, folder=tmp_path, capsys=capsys)
    assert told["context_parallel_suite"].get("nodes") == nodes
    rows = [change["reason"] for change in told["changes"] if change["flag"].startswith("--nproc")]
    assert len(rows) == bool(told_row) and all(str(told_row) in reason for reason in rows)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give a launch script, or flags behind --"),
        (["missing.sh"], "missing.sh: cannot be read: No such file"),
        (["--", "--bf16"], "no flag of context parallelism"),
        (["--", "--context-parallel-size", "2", "--ai-framework", "mindspore"], "the flags are of a training by MindSpore"),
        (["--env", "A=1", "--", "--context-parallel-size", "2"], "--env: needs a launch script"),
        ([str(HYBRID), "--env", "NO_SUCH_VARIABLE"], "must be NAME=VALUE"),
        ([str(HYBRID), "--env", "A-B=1"], "must be NAME=VALUE"),
        ([str(HYBRID), "--output", str(HYBRID)], "is the launch script, too"),
        (["--", "--context-parallel-size", "x"], "must be an integer"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert expected in captured.err


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
