"""The parts of training that need no ranks: memory, identity, files, stopping, what is shown, the launcher's verdict."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.errors import ConfigError, DivergenceError, PeerError, PlanError
from mindspeed_cp.train.comparison import comparison_sentence, comparison_text
from mindspeed_cp.train.exit_note import EXIT_NOTE, write_exit_note
from mindspeed_cp.train.failures import classify_error, is_lost_rank_error
from mindspeed_cp.train.launch import _classify_failures
from mindspeed_cp.train.local_agent import RankFailure, read_failure
from mindspeed_cp.train.loss_curve import LossCurve, thinned
from mindspeed_cp.train.memory import check_memory, minimum_bytes
from mindspeed_cp.train.progress_display import open_display
from mindspeed_cp.train.run_files import RunFiles, read_metrics, truncate_metrics, write_text
from mindspeed_cp.train.run_identity import check_same_run, identity
from mindspeed_cp.train.stop_request import StopRequest
from mindspeed_cp.train.summary import stopped_line, summary_table
from mindspeed_cp.train.tensorboard_writer import TensorBoardWriter, check_tensorboard


def changed(**sections: dict[str, Any]) -> Settings:
    return Settings(**sections)  # type: ignore[arg-type]


# memory


def test_a_model_that_fits_is_let_through() -> None:
    check_memory(Settings(), 4, available=8 * 2**30)


def test_a_context_that_does_not_fit_is_told_with_one_that_does() -> None:
    available = 2**30
    settings = changed(data={"seq_length": 10**7})
    with pytest.raises(ConfigError, match=r"data\.seq_length = 10000000: does not fit.*use at most (\d+)") as caught:
        check_memory(settings, 2, available)
    fits = int(str(caught.value).split("use at most ")[1].split(",")[0])
    check_memory(changed(data={"seq_length": fits}), 2, available)
    with pytest.raises(ConfigError):
        check_memory(changed(data={"seq_length": fits + 2}), 2, available)


def test_a_model_that_does_not_fit_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers = 400: the model does not fit"):
        check_memory(changed(model={"num_layers": 400}), 1, available=2**30)


def test_too_many_ranks_for_the_machine_are_reported() -> None:
    """The error names the ranks, not the model, because no model fits in a third of a MiB; no size is printed as 0.0."""
    many = changed(context_parallel_suite={"context_parallel_size": 100_000})
    with pytest.raises(ConfigError) as caught:
        check_memory(many, 100_000, available=32 * 2**30)
    assert str(caught.value) == (
        "context_parallel_suite.context_parallel_size = 100000: 100000 ranks on this machine would have 335.5 KiB of "
        "its 32.0 GiB each, and a process that imports torch needs more than 16.0 MiB; start at most 2048, or use more "
        "machines"
    )
    with pytest.raises(ConfigError, match=r"^100000 ranks on this machine would have 335"):
        check_memory(changed(context_parallel_suite={"context_parallel_size": 2}), 100_000, available=32 * 2**30)
    with pytest.raises(ConfigError, match=r"^train.tensor_model_parallel_size = 8: 8 ranks on this machine"):
        check_memory(changed(train={"tensor_model_parallel_size": 8}), 8, available=2**20)
    with pytest.raises(
        ConfigError, match=r"need \d+\.\d MiB on each of 1000 local ranks, .* 32\.8 MiB; .* at most \d+ ranks on"
    ):
        check_memory(many, 1000, available=32 * 2**30)


def test_a_row_is_never_told_to_have_no_tokens() -> None:
    settings = changed(data={"seq_length": 10**6})
    room = int(minimum_bytes(settings, 1))  # for weights, and one token
    with pytest.raises(ConfigError, match=r"model\.num_layers = \d+: the model does not fit"):
        check_memory(settings, 1, available=room)


@pytest.mark.parametrize(
    "less",
    [
        {"context_parallel_suite": {"context_parallel_size": 2}},
        {"train": {"tensor_model_parallel_size": 2}},
        {"train": {"bf16": True}},
        {"model": {"recompute_granularity": "full"}},
        {"model": {"num_query_groups": 1}},
        {"model": {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 16,
                   "qk_pos_emb_head_dim": 8, "v_head_dim": 16}},
    ],
    ids=lambda less: next(iter(next(iter(less.values())))),
)  # fmt: skip
def test_what_saves_memory_lowers_the_bound(less: dict[str, Any]) -> None:
    assert minimum_bytes(changed(**less), 1e6) < minimum_bytes(Settings(), 1e6)


def test_experts_need_memory_where_they_are() -> None:
    experts = {"num_moe_experts": 16, "moe_layer_freq": [0, 1, 0, 1]}
    shared = {"expert_model_parallel_size": 4}
    assert minimum_bytes(changed(model=experts), 0) > 2 * minimum_bytes(Settings(), 0)
    assert minimum_bytes(changed(model=experts, train=shared), 0) < minimum_bytes(changed(model=experts), 0) / 2
    everywhere = {**experts, "moe_layer_freq": 1}
    assert minimum_bytes(changed(model=everywhere), 0) > minimum_bytes(changed(model=experts), 0) * 1.5
    split = {"use_distributed_optimizer": True}
    assert minimum_bytes(changed(model=experts, train=split), 0, ranks=8) < minimum_bytes(
        changed(model=experts), 0, ranks=8
    )
    sequences = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    two = {"tensor_model_parallel_size": 2}
    assert minimum_bytes(changed(train=sequences), 1e6) < minimum_bytes(changed(train=two), 1e6)


# identity


def test_what_changes_the_numbers_binds_a_checkpoint() -> None:
    saved = identity(Settings())
    check_same_run(Settings(), saved, "iter_1")
    with pytest.raises(
        ConfigError, match=r"model\.hidden_size was 256 and is 128; .*train\.seed was 1234 and is 1"
    ) as caught:
        check_same_run(changed(model={"hidden_size": 128}, train={"seed": 1}), saved, "iter_1")
    assert str(caught.value).startswith("iter_1 belongs to other settings: ")
    with pytest.raises(ConfigError, match=r"train\.lr_decay_iters \(null: train\.train_iters\) was 100 and is 200"):
        check_same_run(changed(train={"train_iters": 200}), saved, "iter_1")


def test_checkpoints_of_versions_with_fewer_settings_go_on_under_the_defaults() -> None:
    saved = {key: value for key, value in identity(Settings()).items() if key != "model.attention_dropout"}
    check_same_run(Settings(), saved, "iter_1")
    with pytest.raises(ConfigError, match=r"model\.attention_dropout was 0\.0 and is 0\.1"):
        check_same_run(changed(model={"attention_dropout": 0.1}), saved, "iter_1")


def test_the_balance_binds_a_checkpoint_where_weights_are_dropped() -> None:
    """What is dropped depends on rows; without dropout documents may be laid otherwise at any time."""
    by_time = {"balance": "time"}
    check_same_run(changed(data=by_time), identity(Settings()), "iter_1")
    check_same_run(Settings(), identity(changed(data=by_time)), "iter_1")
    dropping: dict[str, Any] = {"model": {"attention_dropout": 0.1}}
    saved = identity(changed(**dropping))
    older = {key: value for key, value in saved.items() if key != "data.balance"}
    for known in (saved, older):
        check_same_run(changed(**dropping), known, "iter_1")
        with pytest.raises(ConfigError, match=r'data\.balance was "none" and is "time"'):
            check_same_run(changed(**dropping, data=by_time), known, "iter_1")


def test_what_does_not_change_the_numbers_may_change() -> None:
    saved = identity(Settings())
    other = changed(
        model={"recompute_granularity": "full", "num_query_groups": 8, "kv_channels": 32},
        train={"tensor_model_parallel_size": 2, "prefetch_micro_batches": 7, "train_iters": 300, "lr_decay_iters": 100},
        checkpoint={"save_interval": 3},
        output={"folder": "elsewhere"},
        context_parallel_suite={"context_parallel_size": 4, "verify_plans": True},
    )
    check_same_run(other, saved, "iter_1")
    constant = identity(changed(train={"lr_decay_style": "constant"}))
    check_same_run(changed(train={"lr_decay_style": "constant", "train_iters": 300}), constant, "iter_1")


# files


def test_metrics_behind_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, 5)
    assert read_metrics(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')  # a crash cut the last line
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_the_lines_of_a_curve_are_thinned_to_a_bounded_number() -> None:
    for steps in (0, 1, 7, 8, 9, 1000, 1023):
        lines = ({"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5, "tokens": 7} for step in range(1, steps + 1))
        steps_shown = [line["step"] for line in thinned(lines, points=4)]
        assert steps_shown[:1] == [1][:steps] and steps_shown[-1:] == [steps][:steps]
        assert len(steps_shown) <= 8
        assert len(set(np.diff(steps_shown[:-1]))) <= 1


def test_a_picture_that_cannot_be_drawn_is_told_and_ends_nothing(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.loss_png.mkdir()
    files.metrics.write_text('{"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 0.5}\n')
    curve = LossCurve(files)
    curve.draw()
    problem = curve.finish()
    assert problem is not None and "IsADirectoryError" in problem
    files.loss_png.rmdir()
    curve.draw()
    assert curve.finish() is None and files.loss_png.read_bytes().startswith(b"\x89PNG")


def test_tensorboard_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(changed())
    with pytest.raises(ConfigError, match=r"^output.tensorboard = true: .*; pip install 'mindspeed-cp\[tensorboard\]'"):
        check_tensorboard(changed(output={"tensorboard": True}))


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_the_figures_of_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 4), (2, 3)):  # the second start goes back to step 2
        writer = TensorBoardWriter(tmp_path, first)
        for step in range(first + 1, last + 1):
            writer.step({"step": step, "loss": first + step / 10, "plans": 2, "algorithms": {"ring": 1}})
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "plans"]
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("loss")] == [(1, 0.1), (2, 0.2), (3, 2.3)]


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    write_text(path, "old\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new\n")
    assert path.read_text() == "old\n"


def test_a_folder_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    files.create()
    with files.locked(), pytest.raises(ConfigError, match="another run is using it"), files.locked():
        pass
    with files.locked():
        pass


# stopping


def test_signals_are_remembered_and_the_second_interrupt_is_obeyed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launcher_that_dies_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.reason == "the death of the launcher"


# what is shown

LINE = {"step": 10, "loss": 2.5, "tokens_per_s": 12345.6, "imbalance": 1.01, "grad_norm": 0.5, "lr": 1e-3}


def test_lines_are_printed_at_the_interval_and_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display("auto", 0, 25, 10)  # standard output is no terminal here
    for step in range(1, 26):
        display.step({**LINE, "step": step, "seconds": 2.0})
    display.note("hello")
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "10/25", "20/25", "25/25"]
    assert "loss 2.5000  12,346 tokens/s  imbalance 1.010" in lines[0] and lines[-1] == "hello"
    assert lines[0].endswith("eta 0:00:48") and lines[2].endswith("eta 0:00:10") and "eta" not in lines[3]


def test_a_bar_shows_the_same_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    display = open_display("bar", 3, 25, 10)
    display.step(LINE)
    display.note("hello")
    display.close()
    out = capsys.readouterr().out
    for part in ("10/25", "loss 2.5000", "12,346 tokens/s", "imbalance 1.010", "hello"):
        assert part in out


def test_what_is_shown_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = open_display("lines", 0, 10_000, 1)
    lines.step({**LINE, "step": 9_999, "tokens_per_s": 1234567.8, "seconds": 2.0})
    note = "a long remark about the run, with the words-in-one-piece kept " * 3
    lines.note(note)
    bar = open_display("bar", 3, 2500, 10)
    bar.step(LINE)
    bar.note(note)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).replace("\r", "\n")
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines()) and "…" not in shown
    assert shown.count("words-in-one-piece") == 6 and "imbalance 1.010 eta" in shown and "imbalance 1.010  eta" in shown


def test_none_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display("none", 0, 25, 1)
    display.step(LINE)
    display.note("hello")
    display.close()
    assert capsys.readouterr().out == ""


SUMMARY: dict[str, Any] = {
    "step": 7, "steps": 9, "stopped_by": "SIGTERM", "first_loss": 5.5, "last_loss": 2.25, "tokens": 10**6,
    "restarts": 2, "rollbacks": 0, "skipped_steps": 1,
    "tokens_per_s": 8000.0, "imbalance": 1.02, "documents": 321, "corpus_documents": 1790, "cut_documents": 12,
    "document_chunks": 40, "context": 4096, "metrics": "runs/a/metrics.jsonl", "loss_png": "runs/a/loss.png",
    "checkpoint": "runs/a/checkpoints/iter_0000007",
}  # fmt: skip


def test_the_summary_names_everything() -> None:
    text = " ".join(cell for row in summary_table(SUMMARY).rows for cell in row)
    for part in (
        "7 of 9",
        "5.500",
        "2.250",
        "8,000 tokens/s",
        "1.020",
        "12 of 1,790",
        "40 chunks",
        "runs/a/loss.png",
        "2 restarts, 1 skipped steps",
    ):
        assert part in text
    line = stopped_line(SUMMARY)
    assert line is not None and "SIGTERM after step 7" in line and "iter_0000007" in line
    assert stopped_line({**SUMMARY, "stopped_by": None}) is None
    planned = {
        "replica_imbalance": 1.234,
        "planning_seconds": 2.5,
        "waiting_seconds": 0.125,
        "plans": 8,
        "cached_plans": 3,
    }
    text = " ".join(cell for row in summary_table({**SUMMARY, **planned}).rows for cell in row)
    for part in (
        "1.234 (modelled time",
        "2.50 s ahead of the steps",
        "waited 0.12 s",
        "3 of 8 plans were in the cache",
    ):
        assert part in text
    empty = {**SUMMARY, "step": 0, "last_loss": None, "tokens_per_s": None, "loss_png": None, "checkpoint": None}
    assert summary_table(empty).rows


# errors and the launcher's verdict


def test_errors_become_a_kind_a_line_and_an_exit_code() -> None:
    assert classify_error(ConfigError("a")) == ("input", "a", 2)
    assert classify_error(PlanError("b")) == ("input", "b", 2)
    assert classify_error(DivergenceError("d")) == ("divergence", "d", 1)
    assert classify_error(PeerError("c")) == ("peer", "c", 1)
    assert classify_error(PermissionError(13, "Permission denied", "a.txt")) == ("files", "a.txt: Permission denied", 1)
    assert classify_error(KeyError("d")) == ("bug", "KeyError: 'd'", 1)
    assert is_lost_rank_error(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"))
    assert not is_lost_rank_error(RuntimeError("shape mismatch"))


@dataclass(frozen=True)
class Failed:
    """How a rank ended: what it had put on record, if anything, and the second in which it did so or was found dead."""

    code: int
    kind: str | None
    text: str
    seconds: int


def failure(code: int, kind: str | None = None, text: str = "", seconds: int = 0) -> Failed:
    return Failed(code, kind, text, seconds)


def recorded(failed: Failed, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the record of a rank at the second in which it ended."""
    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: float(failed.seconds))
        patched.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if failed.kind:
            write_exit_note(failed.kind, failed.text)


def seen_by_the_agent(
    failures: dict[int, Failed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, RankFailure]:
    """As the launcher reads it, from real records of the ranks."""
    results = {}
    for rank, failed in failures.items():
        path = folder / f"record{rank}"
        recorded(failed, path, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr("time.time", lambda failed=failed: float(failed.seconds))
            results[rank] = read_failure(rank, 100, failed.code, path)
    return results


def seen_by_torchrun(
    failures: dict[int, Failed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[int, ProcessFailure]:
    """As the agent of torchrun reads it, from the same records."""
    results = {}
    for rank, failed in failures.items():
        path = folder / f"record{rank}"
        recorded(failed, path, monkeypatch)
        results[rank] = ProcessFailure(rank, 100, failed.code, str(path))
    return results


@pytest.mark.parametrize(
    ("failures", "asked", "code", "expected"),
    [
        ({0: failure(1, "peer", "lost rank 1"), 1: failure(-9)}, [], 1, "rank 1 (process 100) was killed by SIGKILL"),
        ({0: failure(-6), 1: failure(-9)}, [], 1, "rank 1 (process 100) was killed by SIGKILL"),
        (
            {0: failure(-6, seconds=1), 1: failure(-6)},
            [],
            1,
            "rank 1 (process 100) aborted (SIGABRT): on NPUs torch_npu does that when an HCCL operation fails or a peer does not answer within context_parallel_suite.timeout_seconds or HCCL_EXEC_TIMEOUT",
        ),
        (
            {0: failure(1, "peer", "lost rank 1", 3), 1: failure(-9)},
            [],
            1,
            "rank 1 (process 100) was killed by SIGKILL",
        ),
        ({0: failure(1, "peer", "lost rank 1", 3), 1: failure(-9, seconds=30)}, [], 1, "lost rank 1"),
        ({0: failure(2, "input", "bad lr"), 1: failure(1, "peer", "lost rank 0")}, [], 2, "bad lr"),
        ({0: failure(1, "peer", "lost rank 1"), 1: failure(1, "bug", "KeyError")}, [], 1, "rank 1 failed: KeyError"),
        ({0: failure(-15), 1: failure(1, "peer", "lost rank 0")}, [], 1, "lost rank 0"),
        ({0: failure(-15), 1: failure(-15)}, [], 1, "rank 0 (process 100) was killed by SIGTERM"),
        ({0: failure(-15), 1: failure(-15)}, ["SIGTERM"], 0, "stopped by SIGTERM; the same command goes on"),
        ({0: failure(-9, seconds=30), 2: failure(-9)}, [], 1, "rank 2 (process 100) was killed by SIGKILL"),
        ({2: failure(-11), 3: failure(-15)}, [], 1, "rank 2 (process 100) was killed by SIGSEGV"),
        ({1: failure(3)}, [], 1, "rank 1 failed: (process 100) ended with exit code 3"),
        ({0: failure(-6, EXIT_NOTE, "last words")}, [], 1, "rank 0 (process 100) aborted (SIGABRT): on NPUs torch_npu"),
        ({0: failure(-9, EXIT_NOTE, "last words"), 1: failure(1, "peer", "lost")}, [], 1, "was killed by SIGKILL"),
        (  # the agent killed a rank that hung, half a minute after the others had given it up
            {1: failure(1, "peer", "lost rank 0", 600), 0: failure(-9, EXIT_NOTE, "last words")},
            [],
            1,
            "lost rank 0",
        ),
        (  # it died first, and then the others lost it
            {1: failure(-9, EXIT_NOTE, "last words"), 0: failure(1, "peer", "lost rank 1", 600)},
            [],
            1,
            "rank 1 (process 100) was killed by SIGKILL",
        ),
        (  # and when all have last words, the first that was found dead
            {2: failure(-9, EXIT_NOTE, "last words"), 0: failure(-9, EXIT_NOTE, "last words")},
            [],
            1,
            "rank 2 (process 100) was killed by SIGKILL",
        ),
        ({0: failure(1, "device", "refused"), 1: failure(1, "peer", "lost")}, [], 1, "rank 0 failed: refused"),
    ],
)
def test_the_verdict_names_the_cause(
    failures: dict[int, Failed],
    asked: list[str],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure, line = _classify_failures(seen_by_the_agent(failures, tmp_path, monkeypatch), asked)
    assert failure == code and expected in line and "\n" not in line


def test_torchrun_takes_no_last_words_for_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written at the start, long before what really ended the run."""
    failures = {0: failure(-6, EXIT_NOTE, "last words", 100), 1: failure(1, "device", "refused", 900)}
    error = ChildFailedError("train", seen_by_torchrun(failures, tmp_path, monkeypatch))
    rank, cause = error.get_first_failure()
    assert rank == 1 and cause.message["message"] == "refused"  # type: ignore[index]
    assert "refused" in str(error).split("Root Cause")[1] and "last words" in str(error).split("Root Cause")[0]


def test_the_comparison_is_a_table_and_a_sentence() -> None:
    figures = {"loss": 5.5, "imbalance": 1.0, "sent_bytes": 4 * 2.0**20, "seconds": 0.5}
    rows = [{"algorithm": "ring", **figures}, {"algorithm": "direct", **figures, "sent_bytes": 2.0**20}]
    comparison = {"batches": 3, "documents": [7, 4096], "one_machine": True, "algorithms": rows}
    text = comparison_text(comparison)
    assert "3 batches" in text and "2 documents of 7 to 4,096 tokens" in text and "500" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["ring", "direct"]
    sentence = comparison_sentence(comparison)
    assert sentence is not None and "direct sent 1.0 MiB in a step and ring 4.0 MiB, 75% less" in sentence
    assert "imbalance is not lower: 1.000 against 1.000 (1 is perfect balance, which ring has already)" in sentence
    assert "step is not faster: 500 ms against 500 (the ranks share a machine" in sentence
    better = comparison_sentence({**comparison, "algorithms": [{**rows[0], "imbalance": 1.5, "seconds": 1.0}, rows[1]]})
    assert better is not None and "imbalance is lower: 1.000 against 1.500." in better and "(" not in better
    assert "step is faster: 500 ms against 1,000." in better
    stopped = {**comparison, "algorithms": [{**rows[0], "loss": None}]}
    assert comparison_sentence(stopped) is None and "stopped" in comparison_text(stopped)
    alone = {**comparison, "algorithms": rows[:1]}  # train.compare has no other algorithm
    assert comparison_sentence(alone) is None and comparison_text(alone).splitlines()[-1].startswith("  ring")
