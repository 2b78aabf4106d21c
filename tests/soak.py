"""A long run of a tiny model, from outside: memory and open files of every rank stay as they were (`make soak`)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
import yaml

from mindspeed_cp.train.run_files import read_metrics

ROOT = Path(__file__).parents[1]
SETTLED = 300  # steps, after which nothing may grow
GROWTH = 0.02  # of the resident memory that a rank had after these
WINDOW = 100  # steps; files are opened for moments, so the least number in a window counts


def settings(folder: str, steps: int, ranks: int) -> dict[str, dict[str, object]]:
    """Return settings of a tiny model that saves, draws and prunes now and then."""
    return {
        "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"seq_length": 256},
        "train": {"train_iters": steps, "global_batch_size": 1, "lr": 1e-3, "threads_per_rank": 1},
        "checkpoint": {"save_interval": 150},
        "output": {"folder": folder, "log_interval": 0},
        "context_parallel_suite": {"context_parallel_size": ranks},
    }


def soak(folder: Path, steps: int, ranks: int) -> dict[int, list[tuple[int, int, int]]]:
    """Train; return (step, bytes of resident memory, open files) of each rank, sampled all the while."""
    config = folder / "settings.yaml"
    config.write_text(yaml.safe_dump(settings(str(folder / "run"), steps, ranks)))
    samples: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    metrics, step = folder / "run" / "metrics.jsonl", 0
    launcher = subprocess.Popen([sys.executable, "-m", "mindspeed_cp.cli.main", "train", str(config)], cwd=ROOT)
    try:
        while launcher.poll() is None:
            time.sleep(0.2)
            step = max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0
            for process in psutil.Process(launcher.pid).children() if 0 < step < steps else ():  # then they end
                try:
                    rank = int(process.environ()["RANK"])
                    samples[rank].append((step, process.memory_info().rss, process.num_fds()))
                except (psutil.Error, KeyError):  # it has just begun or ended
                    continue
    finally:
        launcher.kill()
    if launcher.returncode:
        raise SystemExit(f"soak: the run ended with exit code {launcher.returncode}")
    return samples


def problems(samples: dict[int, list[tuple[int, int, int]]]) -> list[str]:
    """Return one line for each rank whose memory or open files grew after SETTLED steps."""
    growth = []
    for rank, rows in sorted(samples.items()):
        settled = [row for row in rows if row[0] >= SETTLED]
        first, most = settled[0][1], max(bytes_ for _, bytes_, _ in settled)
        least: dict[int, int] = {}
        for step, _, files in settled:
            window = step // WINDOW
            least[window] = min(files, least.get(window, files))
        counts = list(least.values())
        print(
            f"rank {rank}: {first / 2**20:.1f} MB at step {settled[0][0]}, at most {most / 2**20:.1f} MB until step "
            f"{settled[-1][0]} ({most / first - 1:+.2%}); open files {sorted(set(counts))}"
        )
        if most > first * (1 + GROWTH):
            growth.append(f"rank {rank}: memory grew by {most / first - 1:.2%}, at most {GROWTH:.0%} may be")
        if len(set(counts)) > 1:
            growth.append(f"rank {rank}: open files went from {counts[0]} to {counts[-1]}")
    return growth


def main() -> None:
    """Run the soak, and end with exit code 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.steps <= SETTLED + 2 * WINDOW:
        parser.error(f"--steps {arguments.steps}: must be more than {SETTLED + 2 * WINDOW}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(Path(folder), arguments.steps, arguments.ranks)
    growth = problems(samples) if len(samples) == arguments.ranks else ["not every rank was seen"]
    for line in growth:
        print(f"FAILED: {line}")
    raise SystemExit(bool(growth))


if __name__ == "__main__":
    main()
