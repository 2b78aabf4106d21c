"""The inputs of the doctor's reference, which every type holds."""

from __future__ import annotations

import torch

from mindspeed_cp.doctor.operator import DTYPES, SHORT_CASES
from mindspeed_cp.doctor.reference import reference_inputs


def test_every_type_holds_the_inputs() -> None:
    inputs = reference_inputs(SHORT_CASES[0].reference_key(0))
    for dtype in DTYPES.values():
        assert all(torch.equal(x.to(dtype).float(), x) for x in inputs)
    assert max(float(x.abs().max()) for x in inputs) > 2 and len(torch.unique(inputs[0])) > 80
