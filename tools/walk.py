"""Counts the functions and files of the package that common calls pass through: how far a reader has to follow.

    python tools/walk.py                          # the package on PYTHONPATH, or the installed one
    PYTHONPATH=/path/to/an/older/tree python tools/walk.py --list

The walks are a warm forward and backward of `context_parallel_attention` (a ring of two gloo processes, the second call
of its plan), `build_plan` of a ring, and the way of the settings of a ring and of a hierarchical plan from a YAML file
to the plan of further documents. Comprehensions and lambdas count as part of the function that contains them.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SETTINGS = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}
train: {train_iters: 10, lr_warmup_iters: 2}
context_parallel_suite: {context_parallel_size: %d, algorithm: %s}
"""
INNER = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the distinct functions of the package that a call enters, as "file:function", in the order of entry."""
    import mindspeed_cp

    folder = Path(mindspeed_cp.__file__).resolve().parent
    roots = [folder, folder.parent / "ops", folder.parent / "ascend_kernels"]
    names: dict[CodeType, str] = {}

    def enter(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module or the body of a class
        if event != "call" or code in names or code.co_name in INNER or not is_function:
            return
        path = Path(code.co_filename).resolve()
        if any(root in path.parents for root in roots):
            names[code] = f"{path.relative_to(folder.parent)}:{getattr(code, 'co_qualname', code.co_name)}"

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(names.values())


def attention(rank: int, store: str, results: Any) -> None:
    """Walk the second forward and backward of a ring of two processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    import mindspeed_cp as cp

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    plan = cp.build_plan(cp.Documents([64, 20]), cp.Topology(1, 2), cp.AttentionConfig(4, 2, head_dim=16), "ring")
    rows = int(plan.layout.token_counts[rank])
    q, k, v = (torch.randn(rows, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.append(cp.context_parallel_attention(q, k, v, plan))

    def backward() -> None:
        torch.autograd.grad(outputs[-1].sum(), (q, k, v))

    first = walk(forward)
    backward()
    walks = {"attention, first call": first, "attention, warm": walk(forward), "its backward, warm": walk(backward)}
    if rank == 0:
        results.put(walks)
    dist.destroy_process_group()


def plan_walks() -> dict[str, list[str]]:
    """Walk `build_plan` of a ring, and the way of settings from a file to the plan."""
    import mindspeed_cp as cp

    try:
        from mindspeed_cp.config.settings import load_settings
    except ImportError:  # an older tree
        from mindspeed_cp.config import load_settings

    attention, documents = cp.AttentionConfig(4, 2, head_dim=16), cp.Documents([64, 20])

    def from_yaml(name: str, documents: cp.Documents, topology: cp.Topology) -> None:
        settings = load_settings(name)
        suite = settings.context_parallel_suite
        cp.build_plan(documents, topology, attention, suite.algorithm, **settings.plan_options)

    two, eight = cp.Topology(1, 2), cp.Topology(2, 4)
    cp.build_plan(documents, two, attention, "ring")
    walks = {"build_plan of a ring": walk(lambda: cp.build_plan(documents, two, attention, "ring"))}
    further = cp.Documents([6400, 200, 30, 900, 900])
    for algorithm, topology in (("ring", two), ("hierarchical", eight)):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(SETTINGS % (topology.ranks, algorithm))
            file.flush()
            from_yaml(file.name, documents, topology)
            walks[f"{algorithm} from YAML"] = walk(lambda: from_yaml(file.name, further, topology))  # noqa: B023
    return walks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the functions as well")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=attention, args=(rank, f"{folder}/store", results)) for rank in range(2)]
        for process in ranks:
            process.start()
        walks = results.get(timeout=300)
        for process in ranks:
            process.join()
    walks |= plan_walks()
    for name, functions in walks.items():
        files = {function.partition(":")[0] for function in functions}
        print(f"{name:24}{len(functions):4} functions in {len(files):2} files")
        if arguments.list:
            print("".join(f"    {function}\n" for function in functions), end="")


if __name__ == "__main__":
    main()
