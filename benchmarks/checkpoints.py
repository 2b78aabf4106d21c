"""What a checkpoint takes from training: written at once, and in the background (checkpoint.async_save).

Trains a model of some hundred megabytes twice and times what every step boundary spends in the saver, on rank 0. A
background save is charged for its beginning (the agreement and the copy), for the boundary at which it gets its name,
and for the time by which the steps beside it were slower than the median of the others. The first save is left out, as
it makes the buffers, and so is the last one, for which a run waits.

    python -m benchmarks.checkpoints --ranks 2 --hidden 512 --layers 8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.local_agent import local_ranks
from mindspeed_cp.train.run_files import read_metrics

INTERVAL, SAVES = 8, 6


def settings(folder: Path, arguments: argparse.Namespace, async_save: bool) -> Settings:
    """Return the settings of one of the two runs."""
    return Settings(
        model={"num_layers": arguments.layers, "hidden_size": arguments.hidden, "num_attention_heads": 8},  # type: ignore[arg-type]
        data={"seq_length": arguments.context},  # type: ignore[arg-type]
        train={"train_iters": INTERVAL * SAVES, "global_batch_size": 1, "lr": 1e-4},  # type: ignore[arg-type]
        checkpoint={"save_interval": INTERVAL, "async_save": async_save, "keep": 1},  # type: ignore[arg-type]
        output={"folder": str(folder), "progress": "none", "loss_png": False},  # type: ignore[arg-type]
        context_parallel_suite={"context_parallel_size": arguments.ranks},  # type: ignore[arg-type]
    )


def rank(text: str) -> None:
    """In a rank: train, and write the seconds of each call of the saver into saver.json on the first one."""
    from mindspeed_cp.train import worker
    from mindspeed_cp.train.checkpoint_saver import CheckpointSaver

    parsed, calls = Settings.model_validate_json(text), []

    def timed(name: str) -> None:
        call: Callable[..., Any] = getattr(CheckpointSaver, name)

        def wrapper(self: CheckpointSaver, *arguments: Any) -> Any:
            began, pending = time.perf_counter(), self._begun is not None
            result = call(self, *arguments)
            calls.append((name, time.perf_counter() - began, pending))
            return result

        setattr(CheckpointSaver, name, wrapper)

    for name in ("save", "finish_if_written"):
        timed(name)
    worker.run_rank(parsed, as_json=True)
    if os.environ["RANK"] == "0":
        Path(parsed.output.folder, "saver.json").write_text(json.dumps(calls))


def measure(folder: Path, arguments: argparse.Namespace, async_save: bool) -> dict[str, float]:
    """Train; return seconds of a save, by kind, and the bytes of a checkpoint."""
    chosen = settings(folder, arguments, async_save)
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--rank", chosen.model_dump_json()]
    with local_ranks(command, arguments.ranks) as processes:
        failures = processes.wait()
    if failures:
        raise SystemExit(f"a rank failed: {failures}")
    calls = json.loads((folder / "saver.json").read_text())  # one for each step
    steps = [line["seconds"] for line in read_metrics(folder / "metrics.jsonl")]
    usual = median(seconds for seconds, (_, _, pending) in zip(steps[1:], calls[1:], strict=True) if not pending)
    begins, names, slower, in_flight = [], [], [], []
    for save in range(2, SAVES):  # numbered from 1
        first = INTERVAL * save - 1
        beside = [i for i in range(first + 1, first + INTERVAL) if calls[i][2]]
        begins.append(calls[first][1])
        names.append(sum(calls[i][1] for i in beside))
        slower.append(sum(steps[i] - usual for i in beside))
        in_flight.append(len(beside))
    size = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    return {
        "begin": median(begins), "name": median(names), "slower steps": median(slower),
        "steps beside": median(in_flight), "step": usual, "bytes": size,
    }  # fmt: skip


def main() -> None:
    """Print both measurements and their quotient."""
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("ranks", 2), ("hidden", 512), ("layers", 8), ("context", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {how: measure(Path(folder, str(how)), arguments, how) for how in (False, True)}
    whole = found[False]["begin"]
    print(
        f"checkpoint of {found[False]['bytes'] / 2**20:,.0f} MiB, {arguments.ranks} ranks, medians of {SAVES - 2} saves"
    )
    print(f"written at once: {whole:.3f} s; a step takes {found[False]['step']:.3f} s")
    one = found[True]
    taken = one["begin"] + one["name"]
    print(
        f"in the background, beside {one['steps beside']:g} steps: {one['begin']:.3f} s to begin, {one['name']:.3f} s "
        f"to name it ({taken / whole:.1%}); those steps took {one['slower steps']:.3f} s more "
        f"({(taken + one['slower steps']) / whole:.1%} in all)"
    )


if __name__ == "__main__":
    main()
