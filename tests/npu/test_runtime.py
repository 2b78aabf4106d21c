"""The stand-in as a device: memory, properties, random numbers, refusals, the build."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import host_cann
from tests.host_cann.build import BuildError, build
from tests.npu.operators import refused

ROOT = Path(__file__).resolve().parent.parent.parent


def python(code: str, **environment: str) -> str:
    """What a fresh process with the stand-in prints."""
    program = f"from tests import host_cann\ntorch_npu = host_cann.load()\nimport torch\n{code}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_package_is_the_real_one_and_belongs_to_this_torch() -> None:
    import torch_npu

    assert importlib.metadata.version("torch-npu") == "2.13.0" and torch.__version__.split("+")[0] == "2.13.0"
    assert Path(torch_npu.__file__).parent == Path(
        str(importlib.metadata.distribution("torch-npu").locate_file("torch_npu"))
    )


@pytest.mark.thorough  # a Python of its own
def test_a_small_poisoned_device_with_the_other_allocator() -> None:
    code = """
x = torch.empty(1 << 20, device="npu")
print(x.isnan().all().item(), x.view(torch.bfloat16).isnan().all().item())
print(sum(torch.full((1 << 12,), float(i), device="npu").mean().item() for i in range(40)))
try:
    torch.empty(80 << 20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("out of memory" in str(error))
"""
    settings = dict(HOST_CANN_POISON="1", HOST_CANN_MEMORY_MB="64", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert python(code, **settings).splitlines()[-3:] == ["True True", "780.0", "True"]


def test_memory_that_is_used_again_is_poisoned_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3_000_000  # a segment of its own, whatever earlier tests have left in the allocator

    def again() -> torch.Tensor:
        gc.collect()
        torch.npu.empty_cache()
        used = torch.ones(size, device="npu")
        address = used.data_ptr()
        del used
        fresh = torch.empty(size, device="npu")
        assert fresh.data_ptr() == address
        return fresh

    assert (again() == 1).all()
    monkeypatch.setenv("HOST_CANN_POISON", "1")
    assert again().isnan().all()
    assert torch.zeros(size, device="npu").sum().item() == 0


def test_random_numbers_follow_the_seed_and_the_state() -> None:
    def draw() -> list[float]:
        return torch.cat([torch.rand(3, device="npu"), torch.randn(3, device="npu")]).tolist()

    torch.npu.manual_seed(3)
    first, state, second = draw(), torch.npu.get_rng_state(), draw()
    torch.npu.set_rng_state(state)
    assert draw() == second != first
    torch.npu.manual_seed(3)
    assert draw() == first
    torch.manual_seed(3)  # seeds every device
    assert draw() == first


def test_dropout_scales_follows_the_seed_and_has_its_gradient() -> None:
    results = []
    for _ in range(2):
        torch.npu.manual_seed(1)
        x = torch.ones(1000, device="npu", requires_grad=True)
        out = torch.nn.functional.dropout(x, 0.3)
        out.sum().backward()
        assert torch.equal(x.grad, out)
        results.append(out.tolist())
    assert results[0] == results[1]
    assert 200 < results[0].count(0.0) < 400


@pytest.mark.ends_queue(1, 2)
def test_what_the_stand_in_does_not_have_is_refused() -> None:
    x = torch.ones(2, 8, device="npu")
    with refused("FastGelu has no implementation in the stand-in|current working operator name is FastGelu"):
        torch.ops.npu.fast_gelu(x)


def test_a_wrong_order_of_imports_and_an_unknown_mode_of_the_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cann, "_libraries", {})
    with pytest.raises(RuntimeError, match="torch_npu is already imported"):
        host_cann.load()
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "3")
    with pytest.raises(ValueError, match="TASK_QUEUE_ENABLE=3; valid: 0, 1, 2"):
        host_cann.load()


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"gcc is not on PATH.*apt install gcc"):
        build(tmp_path / "libraries")
