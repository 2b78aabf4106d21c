"""What a checkpoint takes from training: written at once, and in the background (checkpoint.async_save).

Between two steps, a background save takes the time to begin (ranks agree who writes what) and, later, to give it its
name. The copy is made during the next forward and backward, and the update waits for what is left of it; the writing
goes on beside more steps. On a CPU both take cores and memory bandwidth from these steps, which is not in the quotient:
they are printed beside it.

    python -m benchmarks.checkpoints --ranks 1 --hidden 1024 --layers 8
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from mindspeed_cp.config.settings import Settings
from mindspeed_cp.train.local_agent import local_ranks

SAVES = 5  # of each kind; the first of them makes the buffers, and is left out


def rank(text: str) -> None:
    """Save in both ways as a rank; the first one prints the times."""
    from mindspeed_cp.megatron import megatron_compat
    from mindspeed_cp.train.checkpoint import begin_save, remove_hidden, save
    from mindspeed_cp.train.checkpoint_writer import Copies
    from mindspeed_cp.train.model import build_training_model
    from mindspeed_cp.train.progress import Progress
    from mindspeed_cp.train.run_files import RunFiles
    from mindspeed_cp.train.world import join_ranks

    settings = Settings.model_validate_json(text)
    files, copies = RunFiles(Path(settings.output.folder)), Copies()
    files.create()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        world.barrier()
        began = time.perf_counter()
        result = call(*arguments)
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    with megatron_compat(), join_ranks(settings) as world:
        training = build_training_model(settings, world)
        training.zero_gradients()
        training.optimizer.step()  # its state is made by the first step
        for number in range(SAVES):
            timed("at once", save, files, training, Progress(step=2 * number + 1), settings, world)
            progress = Progress(step=2 * number + 2)
            begun = timed("begin", begin_save, files, training, progress, settings, world, copies)
            timed("copy", begun.shards.copy)
            timed("write", begun.shards.write)
            timed("name", begun.finish)
            if world.is_first:
                remove_hidden(files)
            world.barrier()
        if world.is_first:
            size = sum(copy.numel() * copy.element_size() for copy in copies.values())
            medians = {name: median(values[1:]) for name, values in seconds.items()}
            share = (medians["begin"] + medians["name"]) / medians["at once"]
            print(f"{size / 2**20:,.0f} MiB on rank 0 of {world.size}; medians of {SAVES - 1} saves, in seconds")
            print("  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
            print(f"begin and name are {share:.1%} of a save at once")


def main() -> None:
    """Start the ranks."""
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("ranks", 1), ("hidden", 1024), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        settings = Settings(
            model={"num_layers": arguments.layers, "hidden_size": arguments.hidden, "num_attention_heads": 8},  # type: ignore[arg-type]
            data={"seq_length": 64},  # type: ignore[arg-type]
            checkpoint={"keep": 1},  # type: ignore[arg-type]
            output={"folder": folder},  # type: ignore[arg-type]
            context_parallel_suite={"context_parallel_size": arguments.ranks},  # type: ignore[arg-type]
        )
        command = [sys.executable, "-m", "benchmarks.checkpoints", "--rank", settings.model_dump_json()]
        with local_ranks(command, arguments.ranks) as processes:
            failures = processes.wait()
    if failures:
        raise SystemExit(f"a rank failed: {failures}")


if __name__ == "__main__":
    main()
