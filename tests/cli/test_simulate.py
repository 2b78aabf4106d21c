"""`mindspeed-cp simulate`: its table, files, settings files, and that bad input is one line and exit code 2."""

from __future__ import annotations

import json
import re
import shlex
import time
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.algorithms.hierarchical import choose_placement
from mindspeed_cp.cli import lengths as cli_lengths
from mindspeed_cp.cli.case import read_algorithms, read_case
from mindspeed_cp.cli.main import run
from mindspeed_cp.cli.options import SimulateOptions
from mindspeed_cp.config.settings import load_settings
from mindspeed_cp.data.corpus import open_corpus
from mindspeed_cp.data.lengths import sample_batch
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.report.progress import show_progress

ROOT = Path(__file__).parents[2]
SMALL = ("--lengths", "3000,40,900,260", "--nodes", "2", "--ranks-per-node", "2", "--heads", "4", "--head-dim", "128")


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail: its one line."""
    assert run(["simulate", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with --json."""
    assert run(["simulate", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_table_has_all_algorithms_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *SMALL]) == 0
    text = capsys.readouterr().out
    for part in ("modelled", "x ring", "of bound", "exposed ms", "hidden ms", "sent/rank", "memory", "lower bound"):
        assert part in text
    lines = [line for line in text.splitlines() if line.strip()]
    names = [line.split()[0] for line in lines if line.split()[0] in ALGORITHMS]
    assert any(line.startswith((f"{names[0]} is the fastest", "Tie: ")) for line in lines)
    assert sorted(names) == sorted(ALGORITHMS)
    assert names == [entry["name"] for entry in simulated(capsys, *SMALL)["algorithms"]]


def test_json_has_the_same_numbers_as_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulated(capsys, *SMALL, "--algorithms", "hierarchical,p2p")
    problem, _ = read_case(SimulateOptions(lengths="3000,40,900,260", nodes=2, ranks_per_node=2, heads=4, head_dim=128))
    (batch,) = problem.batches
    assert report["bound"] == pytest.approx(choose_placement(batch, batch, problem.topology, problem.attention).bound)
    assert (
        report["modelled"] is True and report["ranks"] == 4 and report["batches"] == [{"documents": 4, "tokens": 4200}]
    )
    assert {entry["name"] for entry in report["algorithms"]} == {"ring", "hierarchical"}
    for entry in report["algorithms"]:
        assert entry["fraction_of_bound"] == pytest.approx(report["bound"] / entry["seconds"])
        assert entry["compute"] == pytest.approx(entry["attention"] + entry["linear"])
        assert sum(entry["waits_for"].values()) == pytest.approx(entry["exposed"] + entry["waits_for_slowest"])


def test_files_are_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--png": "a.png", "--trace": "a.json"}
    switches = [text for switch, name in names.items() for text in (switch, tmp_path / name)]
    assert run(["simulate", *SMALL, "--algorithms", "direct", *map(str, switches)]) == 0
    text = capsys.readouterr().out
    assert all(str(tmp_path / name) in text for name in names.values())
    trace = json.loads((tmp_path / "a.json").read_text())
    assert set(trace["otherData"]) == {"direct, modelled", "ring, modelled"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_choice_says_why_in_three_lines_and_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--lengths", "20000,700,300", "--ranks-per-node", "4", "--algorithms", "ring"]
    report = simulated(capsys, *given, "--choose")
    choice = report["choice"]
    assert len(choice["reasons"]) == 3 and choice["algorithm"] in choice["reasons"][0]
    fastest = report["algorithms"][0]
    assert (fastest["algorithm"], fastest["options"]) == (choice["algorithm"], choice["options"])
    assert fastest["algorithm"] != "ring"
    assert run(["simulate", *given, "--choose"]) == 0
    assert f"auto takes\n  {choice['reasons'][0]}\n" in capsys.readouterr().out
    assert "choice" not in simulated(capsys, *given)


def test_a_choice_for_a_training_knows_the_sizes_of_its_model() -> None:
    from mindspeed_cp.cli.simulate import choose

    problem, wanted = read_case(SimulateOptions(config=ROOT / "configs" / "hierarchical.yaml", algorithms="ring"))
    assert problem.sizes["hidden_size"] == 128 and len(wanted) == 1
    decision = choose(problem, wanted)
    assert wanted[1].algorithm == decision.candidate.algorithm == "hierarchical"
    assert wanted[1].all_options(problem.sizes).items() >= problem.sizes.items()


def test_refused_algorithms_are_listed_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "hierarchical:max_seqlen_per_dp_cp_rank=10,hybrid:ulysses_degree=3,direct:prefetch=2:layout=balanced"
    assert run(["simulate", *SMALL, "--algorithms", wanted]) == 0
    text = capsys.readouterr().out
    assert "Cannot run this" in text and "ulysses_degree is 3; valid: a divisor of the 4 ranks: 1, 2, 4" in text
    assert "max_seqlen_per_dp_cp_rank = 10 hold" in text and "direct:prefetch=2:layout=balanced" in text


def test_lengths_are_those_of_the_file_or_drawn_from_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3000\n40\n\n900\n")
    np.save(tmp_path / "a.npy", np.array([3000, 40, 900]))
    for name in ("a.txt", "a.npy"):
        problem, _ = read_case(SimulateOptions(lengths=str(tmp_path / name)))
        assert problem.batches[0].lengths.tolist() == [3000, 40, 900]
        assert problem.source.endswith("as one batch of 3,940 tokens")
        drawn, _ = read_case(SimulateOptions(lengths=str(tmp_path / name), tokens_per_rank=1000, batches=3, seed=5))
        assert [batch.tokens for batch in drawn.batches] == [8000] * 3
        assert all(set(batch.lengths.tolist()[:-1]) <= {3000, 40, 900} for batch in drawn.batches)
        assert drawn.batches[0] != drawn.batches[1]
        again, _ = read_case(SimulateOptions(lengths=str(tmp_path / name), tokens_per_rank=1000, batches=2, seed=6))
        assert again.batches[0] == drawn.batches[1]
    named, _ = read_case(SimulateOptions(lengths="prolong", cluster="a3", nodes=2, seed=3))
    assert named.batches[0].lengths.tolist() == sample_batch("prolong", 2 * 16 * 4096, 3).tolist()


def test_a_settings_file_gives_model_ranks_options_and_its_first_rows() -> None:
    path = ROOT / "configs" / "hierarchical.yaml"
    problem, wanted = read_case(SimulateOptions(config=path))
    settings = load_settings(path)
    stream = PackedStream(open_corpus("stdlib"), 4096, settings.train.seed)
    assert [batch.lengths.tolist() for batch in problem.batches] == [
        next(stream).documents.lengths.tolist() for _ in range(4)
    ]
    assert (problem.topology.nodes, problem.topology.ranks_per_node) == (2, 2)
    assert (problem.attention.heads, problem.attention.kv_heads, problem.attention.head_dim) == (4, 2, 32)
    assert problem.layer.hidden_size == 128
    assert [candidate.algorithm for candidate in wanted] == list(ALGORITHMS)
    own = next(candidate for candidate in wanted if candidate.algorithm == "hierarchical")
    assert own.all_options(problem.sizes) == settings.plan_options

    overrides = ("context_parallel_suite.algorithm=direct", "context_parallel_suite.prefetch=3")
    _, wanted = read_case(SimulateOptions(config=path, overrides=overrides, algorithms="direct,ring"))
    assert [candidate.as_setting for candidate in wanted] == ["direct:prefetch=3", "ring"]
    problem, _ = read_case(
        SimulateOptions(config=path, cluster="a3", nodes=4, lengths="prolong", overrides=("data.seq_length=9000",))
    )
    assert (problem.topology.nodes, problem.cluster.name, problem.batches[0].tokens) == (4, "a3", 9000)
    tensor = ("train.tensor_model_parallel_size=2",)
    assert read_case(SimulateOptions(config=path, overrides=tensor))[0].attention.heads == 2


def test_options_and_overrides_apply_with_and_without_a_settings_file() -> None:
    """As those of `plan`."""
    for config in (None, ROOT / "configs" / "hierarchical.yaml"):
        case, algorithms = read_case(
            SimulateOptions(
                config, lengths="700,30", heads=16, kv_heads=4, head_dim=64, ranks=6, nodes=3, cluster="a3",
                algorithms="direct,ring", overrides=("algorithm=direct", "prefetch=2", "model.hidden_size=256"),
            )
        )  # fmt: skip
        assert (case.attention.heads, case.attention.kv_heads, case.attention.head_dim) == (16, 4, 64)
        assert (case.topology.nodes, case.topology.ranks_per_node, case.cluster.name) == (3, 2, "a3")
        assert [entry.as_setting for entry in algorithms] == ["direct:prefetch=2", "ring"]
        assert case.layer.hidden_size == case.sizes["hidden_size"] == 256
    case, _ = read_case(SimulateOptions(lengths="700,30"))
    assert (case.attention.heads, case.attention.kv_heads, case.attention.head_dim) == (32, 8, 128)
    assert (case.topology.ranks, case.layer.hidden_size, case.sizes, case.notes) == (8, 4096, {}, ())
    for cluster, nodes in (("a2", 4), ("a3", 2)):  # as many nodes as the ranks fill
        case, _ = read_case(SimulateOptions(lengths="700,30", ranks=32, cluster=cluster))
        assert (case.topology.ranks, case.topology.nodes) == (32, nodes)


def test_notes_name_what_is_simulated_otherwise_than_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("data.balance=time", "model.window_size=[100, 0]", "model.window_attn_skip_freq=2")
    problem, _ = read_case(SimulateOptions(config=ROOT / "configs" / "ring.yaml", overrides=overrides))
    said = " / ".join(problem.notes)
    assert (
        "speeds are those of a2" in said
        and "recomputed" not in said
        and "data.balance" in said
        and "1 of 2 layers have a window" in said
    )
    assert problem.attention.window == (100, 0)
    recomputing = ("model.recompute_granularity=selective",)
    said = read_case(SimulateOptions(config=ROOT / "configs" / "ring.yaml", overrides=recomputing))[0].notes
    assert "forwards that are recomputed are not simulated" in said
    moe = read_case(SimulateOptions(config=ROOT / "configs" / "moe.yaml"))[0]
    assert any("experts" in note for note in moe.notes)
    assert run(["simulate", str(ROOT / "configs" / "moe.yaml"), "--algorithms", "ring", "--batches", "1"]) == 0
    assert "note: experts" in capsys.readouterr().out


def test_ranks_without_heads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--lengths", "700,30", "--heads", "6", "--head-dim", "64", "--algorithms", "ulysses,ring")
    assert run(["simulate", *sizes]) == 0
    assert "note: ulysses: 6 heads are fewer than 8 ranks: 2 of these compute nothing" in capsys.readouterr().out


def test_names_with_options_become_algorithms() -> None:
    wanted = read_algorithms("a2a+p2p:ulysses_degree=4, direct:layout=balanced,hierarchical:remap=false")
    assert [candidate.as_setting for candidate in wanted] == [
        "hybrid:ulysses_degree=4", "direct:layout=balanced", "hierarchical:remap=off",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("700\n30\nabc\n", "line 3: 'abc' is not a length"),
        ("700\n\n-30\n", "line 3: '-30' is negative"),
        ("1.5\n", "line 1: '1.5' is not a length"),
        ("5\n99999999999999999999999\n", "line 2: '99999999999999999999999' is too long for a document"),
        ("\n", "there are no lengths in it"),
    ],
)
def test_a_bad_line_of_a_lengths_file_is_named_by_its_number(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_text(content)
    message = failure(capsys, "--lengths", tmp_path / "lengths.txt")
    assert said in message and "lengths.txt" in message and "give whole numbers >= 0" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", ("settings file", "--lengths", "prolong, wikipedia")),
        ("--lengths wikipeda", ("did you mean wikipedia?", "prolong, wikipedia")),
        ("--lengths none.txt", ("no such set or file", "prolong, wikipedia")),
        ("--lengths 0,0", ("no tokens",)),
        ("--lengths 0,0 --batches 2", ("no document with a token",)),
        ("--lengths ''", ("--lengths ''", "prolong, wikipedia")),
        ("--lengths 268435000,457", ("--lengths 268435000,457 over", "268,435,457 tokens, and at most 268,435,456")),
        ("--lengths wikipedia --nodes 512 --tokens-per-rank 65536", ("over 4,096 ranks: ", "chunks", "at most 16,777,216")),
        ("--lengths 1 --tokens-per-rank 2097153", ("over 8 ranks: 16,777,224 chunks of documents", "16,777,216")),
        ("--lengths 700 --cluster a4", ("cluster 'a4'", "a2, a3, a3_superpod, a800, a950, atlas350, h200, h800")),
        ("--lengths 700 --ranks-per-node 16", ("'a2'", "8 ranks", "16 on a node")),
        ("--lengths 700 --nodes 5000", ("40,000 ranks, and at most 4,096",)),
        ("--lengths wikipedia --batches 1001", ("'--batches'", "1000")),
        ("--lengths 700 --heads 7 --head-dim 64 --kv-heads 2", ("--kv-heads: model.num_query_groups = 2: must divide", "7")),
        ("--lengths 700 --algorithms rings", ("--algorithms", "did you mean ring?")),
        ("--lengths 700 --algorithms ring:prefetch=2", ("'prefetch=2': ring has no such option", "layout=")),
        ("--lengths 700 --algorithms ring,hierarchical:fetch_pieces=0", ("hierarchical: fetch_pieces is 0; valid: a whole number of pieces",)),
        ("--lengths 700 --algorithms all,ring", ("--algorithms all: ",)),
        ("--lengths 700 --algorithms ,", ("names no algorithm", "hierarchical")),
        ("--lengths 700 --png a.jpg", ("'.jpg'", ".png")),
        ("--lengths 700 --ranks 6 --nodes 4", ("--ranks 6: must be a multiple of --nodes 4",)),
        ("configs/quickstart.yaml --seed 3", ("--tokens-per-rank, --seed: the rows come from the training", "train.seed=")),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    message = failure(capsys, *shlex.split(arguments))
    assert all(part in message for part in said), message


def test_listed_documents_have_a_bound_in_number_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.full(2**20 + 1, 16))
    said = "over 16 ranks: 16,777,232 chunks of documents for the even ring, and at most 16,777,216"
    assert said in failure(capsys, "--lengths", tmp_path / "a.npy", "--nodes", "2", "--one-batch")
    monkeypatch.setattr(cli_lengths, "MAX_RING_CHUNKS", 3)
    (tmp_path / "a.txt").write_text("1\n2\n3\n4\n")
    assert "more than 3 documents" in failure(capsys, "--lengths", tmp_path / "a.txt")
    monkeypatch.setattr(cli_lengths, "MAX_FILE_BYTES", 7)
    assert "has 8 bytes; valid: at most 7" in failure(capsys, "--lengths", tmp_path / "a.txt")


LAUNCH = "context_parallel_suite: {context_parallel_size: 4, algorithm: ring}\n"
SIZES = "model: {num_attention_heads: 32, num_query_groups: 8, hidden_size: 4096, ffn_hidden_size: 14336}\n"


def test_no_model_of_the_defaults_is_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without sizes of a model is refused; the same sizes in the file or as options are modelled alike."""
    path, lengths = tmp_path / "suite.yaml", ("--lengths", "7000,3000", "--algorithms", "ring")
    path.write_text(LAUNCH)
    options = ("--heads", "32", "--kv-heads", "8", "--head-dim", "128")
    said = failure(capsys, path, *lengths)
    for word in ("model.num_attention_heads is not given", "--heads, --kv-heads, --head-dim and --dtype", str(path)):
        assert word in said
    assert run(["plan", str(path), *lengths[:2]]) == 2 and "is not given" in capsys.readouterr().err
    assert "needs --head-dim" in failure(capsys, path, *lengths, "--heads", "32")
    assert "no section data" in failure(capsys, path, *options)
    assert "--dtype 'fp8': valid: bf16, fp32" in failure(capsys, path, *lengths, *options, "--dtype", "fp8")
    assert "needs the other size" in failure(capsys, *lengths, "--set", "model.ffn_hidden_size=8")
    given = simulated(capsys, path, *lengths, *options)
    assert (given["heads"], given["kv_heads"], given["head_dim"]) == (32, 8, 128)
    assert (given["hidden_size"], given["bytes_per_element"]) == (4096, 2)
    assert simulated(capsys, path, *lengths, *options, "--dtype", "fp32")["bytes_per_element"] == 4
    path.write_text(LAUNCH + SIZES + "train: {bf16: true, tensor_model_parallel_size: 2}\n")
    said_by_file = simulated(capsys, path, *lengths)
    assert (said_by_file["heads"], said_by_file["kv_heads"], said_by_file["bytes_per_element"]) == (16, 4, 2)


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("lengths", ["700,,30", "700, ,30", "7;,3"])
def test_an_empty_length_is_refused(command: str, lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--lengths", lengths]) == 2
    assert "no length stands before a comma" in capsys.readouterr().err


def test_what_takes_minutes_is_said_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_cp.cli.plan.build_plan", lambda *_, **__: pytest.fail("it began"))
    monkeypatch.setattr(cli_lengths, "free_bytes", lambda: float("inf"))
    with pytest.raises(pytest.fail.Exception):
        run(["plan", "--lengths", "wikipedia", "--nodes", "1000"])
    said = capsys.readouterr().err
    assert re.fullmatch(r"note: 1\d,\d+ documents over 4,000 ranks take about \d\d minutes and 1\d.\d GiB\n", said)
    with pytest.raises(pytest.fail.Exception):
        run(["plan", "--lengths", "700,30", "--nodes", "2"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("is_terminal", "wait"), [(True, 0.0), (True, 60.0), (False, 0.0)])
def test_progress_is_shown_on_terminals_where_work_takes_long(
    is_terminal: bool, wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("mindspeed_cp.report.progress.QUIET_SECONDS", wait)
    with show_progress("building") as say:
        say("counting [tiles]")
        until = time.monotonic() + 20
        while is_terminal and not wait and "counting [tiles]" not in stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert ("counting [tiles]" in stream.getvalue()) == (is_terminal and not wait)
    assert bool(stream.getvalue()) == (is_terminal and not wait)


def test_a_plan_beyond_the_free_memory_is_refused_before_it_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_lengths, "free_bytes", lambda: 2.0**30)
    assert run(["plan", "--lengths", "700,30,4100", "--ranks", "4000"]) == 2
    said = capsys.readouterr().err
    assert "3 documents over 4,000 ranks takes about 10.7 GiB, and 1.0 GiB are free" in said
    assert "takes about" in failure(capsys, "--lengths", "700,30", "--nodes", "500", "--algorithms", "ring")
    assert run(["plan", "--lengths", "700,30,4100", "--ranks", "8", "--json"]) == 0


@pytest.mark.parametrize("options", [("--mask", "full"), ("--heads", "64", "--head-dim", "128")])
def test_work_of_long_documents_does_not_overflow(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs times heads have more than 63 bits: an int64 said an imbalance of .5, and negative ones."""
    assert run(["plan", "--lengths", "2147483647", "--ranks", "8", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["imbalance"] == pytest.approx(1, abs=1e-6)
    assert report["step_imbalance"] == pytest.approx(1, abs=1e-6)
    assert min(min(rank["work"]) for rank in report["per_rank"]) > 0


def test_tensor_parallel_ranks_share_the_nodes_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--lengths",
        "700,30",
        "--cluster",
        "a2",
        "--algorithms",
        "ring",
        "--set",
        "train.tensor_model_parallel_size=4",
    ]
    assert simulated(capsys, *words)["ranks"] == 2
    said = failure(capsys, *words, "--ranks-per-node", 8)
    assert "a node needs 32 devices, and one of a2 has 8; give --ranks-per-node 2" in said
