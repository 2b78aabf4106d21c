"""What the tests of the fused operators under torch_npu share: a case's tensors on the device, and its check."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.host_cann import oracle, task_queue
from tests.host_cann.oracle_cases import Case, Inputs, case_of, compare, inputs_of, lse_of, reference

UNEVEN = case_of("mode 3")


@contextmanager
def refused(says: str, *errors: type[Exception]) -> Iterator[None]:
    """Calls in the block are refused with this text: at the call, by torch_npu's queue, or by the stream that computes them.

    What the queue raises names the operator alone; the reason is in torch_npu's log, on standard error.

    Args:
        says: regular expression.
        errors: besides RuntimeError.
    """
    with tempfile.TemporaryFile("w+") as log:
        with _standard_error_to(log), pytest.raises((RuntimeError, *errors)) as caught:
            yield
            task_queue.wait_for_refusal()
        log.seek(0)
        text = str(caught.value)
        text += log.read() if "The Inner error is reported as above" in text else ""
    assert re.search(says, text), text


@contextmanager
def _standard_error_to(file: IO[str]) -> Iterator[None]:
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def to_npu(x: Any) -> Any:
    """On the device, where it is a tensor."""
    return x.to("npu") if isinstance(x, torch.Tensor) else x


def on_npu(case: Case, dtype: torch.dtype) -> tuple[Inputs, list[Tensor], Tensor, dict[str, Any]]:
    """Inputs of the case, leaves on the device, and keyword arguments there."""
    inputs = inputs_of(case, dtype)
    *leaves, dy = (to_npu(x) for x in inputs.tensors)
    options = {name: to_npu(x) for name, x in inputs.options.items()}
    return inputs, [x.requires_grad_() for x in leaves], dy, options | {"scale": inputs.scale}


def bits_of(results: tuple[Any, ...], case: Case) -> Tensor:
    """The dropout mask that seed, offset and numels, as torch_npu returns them, stand for."""
    seed, offset, numels = results[4:7]
    assert numels == oracle.dropout_numels(case.heads[0], case.sizes)
    return oracle.dropout_bits(seed, offset, numels, 1 - case.options["keep_prob"])


def check(case: Case, dtype: torch.dtype) -> None:
    """v2 forward and its autograd node against the dense reference."""
    inputs, leaves, dy, options = on_npu(case, dtype)
    results = torch_npu.npu_fusion_attention_v2(*leaves, case.heads[0], case.layout, **options)
    results[0].backward(dy)
    bits = bits_of(results, case) if "keep_prob" in options else None
    got = dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))
    assert results[0].dtype == dtype and results[1].dtype == results[2].dtype == torch.float32
    compare(got | {"out": results[0], "lse": lse_of(*results[1:3])}, reference(case, inputs, bits), dtype)


def gradient_v2(
    leaves: list[Tensor], dy: Tensor, heads: int, results: tuple[Any, ...], options: dict[str, Any], **change: Tensor
) -> tuple[Tensor, ...]:
    """grad_v2 called by hand, as a ring does it; statistics and output are the forward's unless replaced."""
    given = dict(softmax_max=results[1], softmax_sum=results[2], attention_in=results[0].detach()) | change
    more = dict(options)
    more["scale_value"] = more.pop("scale")
    if "keep_prob" in more:
        more |= dict(zip(("seed", "offset", "numels"), results[4:7], strict=True))
    return torch_npu.npu_fusion_attention_grad_v2(*(x.detach() for x in leaves), dy, heads, "TND", **given, **more)
