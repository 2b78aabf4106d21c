"""What redirecting CUDA costs the host in a step of the training, and what a function mode would cost instead.

    python -m benchmarks.redirect [--steps 60] [--layers 4]

One rank trains a GPT so small that most of a step is Python: 64 channels, rows of 128 tokens. Every step of the loop
runs twice on the same micro-batch, once as it is and once with a TorchFunctionMode around all torch calls in place of
the replaced functions, in turn; the ratio is the median of the ratios of neighbours. The functions that are replaced
are counted in one more step, and the time that such a call takes more than the function itself is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.arguments import Arguments
from mindspeed_cp.megatron.patches.swap import replaced

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
WARM_UP = 5


class CudaMode(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of every torch function by `device`, on the entering thread.

    Args:
        device: takes the place of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if kwargs:
            kwargs = {name: self._device if self._is_cuda(x) else x for name, x in kwargs.items()}
        for x in args:
            if (type(x) is str or type(x) is torch.device) and self._is_cuda(x):
                args = tuple(self._device if self._is_cuda(x) else x for x in args)
                break
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    @staticmethod
    def _is_cuda(x: object) -> bool:
        if isinstance(x, str):
            return x == "cuda" or x.startswith("cuda:")
        return isinstance(x, torch.device) and x.type == "cuda"


def redirections() -> list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]]:
    """Return (owner, name, replacement, function of torch) of what is replaced now."""
    from mindspeed_cp.megatron.patches.cuda_devices import redirected_functions

    names = [(owner, name) for owner, name, _ in redirected_functions(torch.device("cpu"))]
    present = [(owner, name, getattr(owner, name)) for owner, name in names]
    return [(owner, name, x, x.__wrapped__) for owner, name, x in present if hasattr(x, "__wrapped__")]


@contextmanager
def function_mode() -> Iterator[CudaMode]:
    """Redirect CUDA within the block by a mode, and leave the functions of torch as they are."""
    with ExitStack() as stack:
        for owner, name, _, function in redirections():
            stack.enter_context(replaced(owner, name, function))
        yield stack.enter_context(CudaMode(torch.device("cpu")))


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Count the calls of replaced functions within the block, by name."""

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, replacement, _ in redirections():
            stack.enter_context(replaced(owner, name, counting(name, replacement)))
        yield


def added_seconds(repeat: int = 20_000) -> float:
    """Return what a call of a replaced function takes more than that of the function: that of zeros, with a device."""
    _, _, replacement, function = next(x for x in redirections() if x[1] == "zeros")
    device, samples = torch.device("cpu"), []
    for _ in range(9):
        seconds = []
        for make in (replacement, function):
            start = time.perf_counter()
            for _ in range(repeat):
                make(1, device=device)
            seconds.append(time.perf_counter() - start)
        samples.append((seconds[0] - seconds[1]) / repeat)
    return statistics.median(samples)


def measure(folder: str, steps: int, layers: int) -> dict[str, Any]:
    """Train and return the figures of the table, by name."""
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in environment.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    from mindspeed_cp.config.settings import load_settings
    from mindspeed_cp.train.launch import uncompiled_megatron

    small = ["model.hidden_size=64", "model.ffn_hidden_size=128", f"model.num_layers={layers}", "data.seq_length=128"]
    suite = ["context_parallel_suite.context_parallel_size=1", "context_parallel_suite.nodes=1", "train.compare=[]"]
    checks = ["train.check_attention_interval=0"]
    run = ["train.global_batch_size=1", f"train.train_iters={steps + WARM_UP}", "train.threads_per_rank=1"]
    files = [f"output.folder={folder}/run", "output.log_interval=0"]
    settings = load_settings(
        QUICKSTART, [*small, *suite, *checks, *run, *files, "context_parallel_suite.algorithm=ring"]
    )
    seconds: dict[bool, list[float]] = {True: [], False: []}
    modes: list[CudaMode] = []
    calls: Counter[str] = Counter()
    with uncompiled_megatron():
        from mindspeed_cp.megatron import megatron_compat
        from mindspeed_cp.train import loop
        from mindspeed_cp.train.world import join_ranks
    run_step = loop.run_step

    def twice(training: Any, batches: Any, *given: Any) -> Any:
        first = next(batches)
        micro_batches = [first, *(next(batches) for _ in range(len(first.global_batch.rows) - 1))]
        result = None
        for has_mode in (True, False) if len(modes) % 2 else (False, True):
            with function_mode() if has_mode else nullcontext() as mode:
                start = time.perf_counter()
                result = run_step(training, iter(micro_batches), *given)
                seconds[has_mode].append(time.perf_counter() - start)
            if mode is not None:
                modes.append(mode)
        if len(modes) == WARM_UP:
            with counted(calls):
                run_step(training, iter(micro_batches), *given)
        return result

    with (
        megatron_compat(),
        replaced(loop, "run_step", twice),
        join_ranks(settings, store_file=Path(folder, "train-store")) as world,
    ):
        loop.train(settings, world)
        added = added_seconds()
    with_mode, without = (seconds[has_mode][WARM_UP:] for has_mode in (True, False))
    return {
        "mode_ms": statistics.median(with_mode) * 1e3,
        "step_ms": statistics.median(without) * 1e3,
        "ratio": statistics.median(a / b for a, b in zip(with_mode, without, strict=True)),
        "mode_calls": modes[-1].calls,
        "replaced_calls": calls.total(),
        "replaced_call_us": added * 1e6,
        "replaced_share": calls.total() * added / statistics.median(without),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the training, after 5 to warm up")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(folder, arguments.steps, arguments.layers)
    print(f"a step, ms: {figures['step_ms']:.1f}; with a function mode: {figures['mode_ms']:.1f}")
    print(f"with a mode / without, median of neighbours: {figures['ratio']:.3f}")
    print(f"torch calls of a step that the mode sees: {figures['mode_calls']:,}")
    print(
        f"calls of replaced functions: {figures['replaced_calls']:,}, {figures['replaced_call_us']:.2f} us more each: "
        f"{figures['replaced_share']:.2%} of a step"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
