"""Ordinary operators on npu tensors: values, gradients and whole training steps are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.host_cann import control, fallback, task_queue

# x, y: [6, 8]; w: [8, 5]; rows: three row numbers. All but the last are leaves with gradients.
CASES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "arithmetic": lambda x, y, w, rows: (x + y) * 2 - x / (y.abs() + 1) + x**2 + (1 - y).square(),
    "in place through a view": lambda x, y, w, rows: _write_block(x.clone(), y),
    "out of order memory": lambda x, y, w, rows: (x.t() @ y).t()[::2].contiguous() + w.sum() * y.t()[:4, 1::2].sum(),
    "cat, stack, split, chunk": lambda x, y, w, rows: torch.cat([*x.split(3), torch.stack([x, y]).sum(0), *y.chunk(2)]),
    "indexing": lambda x, y, w, rows: x.index_select(0, rows).sum() + x[rows].sum() + x[:, 2:5].sum() + x[x > 0].sum(),
    "index_add, index_copy, index_put": lambda x, y, w, rows: (
        torch.zeros_like(x).index_add(0, rows, y[:3]) + x.index_copy(0, rows, y[:3]) + x.index_put((rows,), y[0])
    ),
    "matmul, linear, einsum": lambda x, y, w, rows: x @ w + F.linear(y, w.t()) + torch.einsum("ij,jk->ik", x, w),
    "reductions": lambda x, y, w, rows: (
        x.sum(0) + x.mean() + x.amax(0) + x.max(0)[0] + x.logsumexp(0) + x.std() + x.var(0)
    ),
    "softmax": lambda x, y, w, rows: x.softmax(-1) + y.log_softmax(0) + F.logsigmoid(x),
    "layer_norm, rms_norm, group_norm": lambda x, y, w, rows: (
        F.layer_norm(x, (8,), y[0], y[1]) + F.rms_norm(x, (8,), y[0]) + F.group_norm(x, 2, y[2], y[3])
    ),
    "cross entropy": lambda x, y, w, rows: (
        F.cross_entropy(x, rows.repeat(2)) + F.nll_loss(y.log_softmax(1), rows.repeat(2))
    ),
    "casts": lambda x, y, w, rows: (
        (x.bfloat16().float() + x.half().float() + x.double().float()).to(torch.float64).float()
    ),
    "rotary": lambda x, y, w, rows: torch.cat([-x[..., 4:], x[..., :4]], -1) * y.cos() + x * y.sin(),
    "sort, topk, argmax": lambda x, y, w, rows: (
        x.topk(3)[0].sum() + x.sort(1)[0][:, 0].sum() + x.argmax(1).float().sum() + y.median()
    ),
    "lists of tensors": lambda x, y, w, rows: sum(t.sum() for t in torch._foreach_mul([x, y, w], 2.0)),
    "autocast": lambda x, y, w, rows: _autocast(x, w),
    "checkpoint": lambda x, y, w, rows: checkpoint(lambda a: (a @ w).relu(), x, use_reentrant=False),
    "second order": lambda x, y, w, rows: torch.autograd.grad((x**3 * y).sum(), x, create_graph=True)[0],
}


def _write_block(x: Tensor, y: Tensor) -> Tensor:
    x[1:4, ::2] = y[:3, :4]
    x[:, 3].mul_(2)
    return x


def _autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        out = x @ w
    assert out.dtype == torch.bfloat16
    return out


def on(device: str, case: Callable[..., Tensor]) -> list[Tensor]:
    """Result and gradients of a case."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((6, 8), (6, 8), (8, 5))]
    out = case(*leaves, torch.tensor([3, 0, 5]).to(device))
    assert out.device.type == device
    (out.float() * torch.linspace(-1, 2, out.numel()).to(device).view(out.shape)).sum().backward()
    grads = [torch.zeros(()) if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]
    return [out.detach().cpu(), *grads]


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest) -> Iterator[None]:
    """Results at once, and as a device has them: late, after random delays."""
    with control.late() if request.param else nullcontext():
        control.jitter(50 if request.param else 0)
        yield
        torch.npu.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_an_operator_group_and_its_gradients_equal_the_cpu(name: str, late: None) -> None:
    expected, given = on("cpu", CASES[name]), on("npu", CASES[name])
    assert any(tensor.any() for tensor in expected[1:])
    for a, b in zip(expected, given, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def train(device: str, steps: int = 5) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a two-layer transformer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(53, 32), Block(32, 4), Block(32, 4), nn.LayerNorm(32), nn.Linear(32, 53)).to(
        device
    )
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses, norms = torch.Generator().manual_seed(1), [], []
    batches = [torch.randint(0, 53, (3, 25), generator=generator) for _ in range(2)]
    for step in range(steps):
        tokens = batches[step % 2].to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        update.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        update.step()
        losses.append(loss.item())
    return losses, norms


def test_training_a_transformer_equals_the_cpu(late: None) -> None:
    served = fallback.calls.total()
    expected, given = train("cpu"), train("npu")
    assert fallback.calls.total() - served > 500  # it did not run elsewhere
    assert expected[0][0] - expected[0][-1] > 0.01  # it learns
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_copies_between_devices_and_types() -> None:
    x = torch.arange(6.0).view(2, 3)
    on_one = x.to("npu:1")
    assert on_one.device.index == 1
    assert torch.equal(on_one.to("npu:0").cpu(), x)
    assert torch.equal(on_one.t().to("npu:0", torch.int32).cpu(), x.t().to(torch.int32))
    assert torch.equal((on_one + 1).cpu(), x + 1) and (on_one + 1).device.index == 1


@pytest.mark.skipif(task_queue.mode() != 0, reason="torch-npu has a queue for each device, and no order between them")
def test_a_gradient_flows_from_one_device_to_another() -> None:
    x = torch.arange(3.0, device="npu:0", requires_grad=True)
    (x.to("npu:1") ** 2).sum().to("cpu").backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4]


def test_backward_runs_on_the_stream_of_the_forward() -> None:
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(torch.npu.current_stream().npu_stream)
            return grad

    side = torch.npu.Stream()
    x = torch.ones(3, device="npu", requires_grad=True)
    with torch.npu.stream(side):
        y = Note.apply(x)
    torch.npu.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen == [side.npu_stream]
