"""The oracle on random packed calls against dense fp64: lengths, windows, head counts and starts that nobody chose."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_cann import oracle
from tests.host_cann.oracle_cases import (
    Case,
    band,
    bottom_right,
    compare,
    everything,
    inputs_of,
    lse_of,
    one_is,
    reference,
    top_left,
)

LENGTH = st.integers(0, 12)


@st.composite
def cases(draw):
    """A call that the operator takes."""
    mode = draw(st.sampled_from([0, 2, 3, 4, 7, 8]))
    sizes = [(q, q + more) for q, more in draw(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5))]
    if mode in (0, 2):  # the only ones that also take more queries than keys
        sizes = [(q, max(k - draw(LENGTH), min(q, 1))) for q, k in sizes]
    sizes = sizes if all(map(sum, zip(*sizes, strict=True))) else [*sizes, (3, 5)]
    changed_index = {7: len(sizes) - 1, 8: 0}.get(mode)
    if changed_index is not None and sizes[changed_index][0] == 0:
        sizes[changed_index] = (2, 7)
    mask, options = "upper", dict(sparse_mode=mode)
    if mode == 4:
        pre = draw(st.integers(0, 9))
        following = draw(st.integers(0 if pre else 1, 4))  # the gradient refuses a band of one key
        sees, options = band(pre, following), options | dict(pre_tokens=pre, next_tokens=following)
    elif changed_index is not None:
        live = [i for i, x in enumerate(sizes) if x[0]]
        following = (
            -draw(st.integers(0, sizes[changed_index][1] - sizes[changed_index][0]))
            if mode == 7
            else draw(st.integers(0, 3))
        )
        options |= dict(pre_tokens=sizes[changed_index][1], next_tokens=following)
        others = bottom_right if mode == 7 else top_left
        sees = one_is(live[-1 if mode == 7 else 0], band(sizes[changed_index][1], following), others)
    else:
        sees = {0: everything, 2: top_left, 3: bottom_right}[mode]
        mask = "none" if mode == 0 else mask
    pse = "none"
    if mode in (0, 2, 3) and all(q for q, _ in sizes) and draw(st.booleans()):
        sizes, pse = [(q, q) for q, _ in sizes], draw(st.sampled_from(["slopes", "batch slopes"]))
        starts = [draw(st.integers(0, 50)) for _ in range(2)]
        options |= dict(pse_type=draw(st.sampled_from([2, 3])), q_start_idx=starts[:1], kv_start_idx=starts[1:])
    kv, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    if draw(st.booleans()):
        options["keep_prob"] = draw(st.sampled_from([0.5, 0.9]))
    return Case("random", tuple(sizes), sees, mask=mask, pse=pse, heads=(kv * group, kv), dims=(8, 4), options=options)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_any_call(case):
    inputs = inputs_of(case, torch.float32)
    options, bits = inputs.options, None
    if "keep_prob" in options:
        numels = oracle.dropout_numels(case.heads[0], case.sizes)
        bits = oracle.dropout_bits(1, 2, numels, 1 - options["keep_prob"])
        options = options | {"drop_mask": bits}
    q, k, v, dy = inputs.tensors
    out, largest, total = oracle.fused_attention(q, k, v, case.heads[0], "TND", scale=inputs.scale, **options)
    given_ = dict(softmax_max=largest, softmax_sum=total, attention_in=out, scale_value=inputs.scale)
    grads = oracle.fused_attention_grad(q, k, v, dy, case.heads[0], "TND", **given_, **options)
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True), out=out, lse=lse_of(largest, total))
    compare(got, reference(case, inputs, bits), torch.float32)
