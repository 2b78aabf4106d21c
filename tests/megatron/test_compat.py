"""Versions of Megatron-core: what is patched, where, and that nothing is on import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import install, install_model, megatron_compat, megatron_imports
from mindspeed_cp.megatron.patches.compat import PATCHES, replaced
from mindspeed_cp.megatron.patches.imports import check_version, parse_version
from tests.megatron.gpt import (
    VERSION,
    Suite,
    build,
    lacks,
    layer_spec,
    one_rank,
    transformer_config,
)
from tests.megatron.packed import plain_params

with megatron_imports():
    import megatron.core
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

IS_0_16 = parse_version(megatron.core.__version__) == (0, 16)
MIXTURE = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
)  # fmt: skip


def test_patches_are_applied_on_call_and_undone() -> None:
    before = [vars(module).copy() for module in (moe_utils, multi_latent_attention, token_dispatcher)]
    with megatron_compat() as outer, megatron_compat() as inner:
        assert set(inner) <= set(outer)
        if IS_0_16:
            needed = [f"{module}.{name}" for module, name, first, end, _ in PATCHES if first <= (0, 16) < end]
            assert len(needed) == 3 and outer == needed
            assert moe_utils.te_general_gemm is None and multi_latent_attention.HAVE_TE is False
        sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
        assert sizes.tolist() == [1, 2] and not isinstance(sizes, torch.Tensor)
    assert before == [vars(module) for module in (moe_utils, multi_latent_attention, token_dispatcher)]


@pytest.mark.parametrize("text", ["0.11.0", "0.13.1", "0.14.0", "0.15.0rc8"])
def test_versions_outside_0_12_and_0_16_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"megatron-core is {text}; valid: 0\.12 .*or 0\.16 or later.*use 0\.16\.1"):
        check_version(text)


def test_versions_are_read() -> None:
    assert parse_version("0.16.1") == (0, 16)
    assert parse_version("0.16.0rc0.dev12") == (0, 16)
    assert parse_version("1.2") == (1, 2)
    check_version("0.19.2")


def test_a_misspelt_setting_is_an_error_and_no_skip() -> None:
    with pytest.raises(KeyError, match="num_layres"):
        lacks({"num_layers": 2, "num_layres": 2})
    assert lacks({"dynamic_context_parallel": False}) in (
        None,
        f"megatron-core {VERSION} has no dynamic_context_parallel",
    )


@pytest.mark.skipif(not IS_0_16, reason="only 0.16 forgets the name")
def test_a_mixture_of_experts_needs_the_patch() -> None:
    tokens = torch.arange(8)[None]  # which are the positions, too
    with one_rank():  # which applies the patches
        config = transformer_config(**MIXTURE)
        model = install_model(build(config, install(layer_spec(config), Suite())))
        model(tokens, tokens, None, packed_seq_params=plain_params([8]))
        with replaced(moe_utils, "te_general_gemm", None):
            del moe_utils.te_general_gemm
            with pytest.raises(NameError, match="te_general_gemm"):
                model(tokens, tokens, None, packed_seq_params=plain_params([8]))
            moe_utils.te_general_gemm = None


def test_importing_says_nothing_and_patches_nothing() -> None:
    program = """
import torch
before = {name: id(value) for name, value in vars(torch.cuda).items()}
import mindspeed_cp.megatron
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
assert all(id(getattr(torch.cuda, name)) == value for name, value in before.items())
assert token_dispatcher.maybe_move_tensor_to_cpu.__module__.startswith("megatron.core")
import megatron.core
if megatron.core.__version__.startswith("0.16"):
    assert not hasattr(moe_utils, "te_general_gemm") and multi_latent_attention.HAVE_TE
import torch.distributed
assert not torch.distributed.is_initialized()
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", program], capture_output=True, text=True)
    # A build of torch for CUDA tells of a machine without its driver and with its compiler.
    errors = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.returncode, done.stdout, errors) == (0, "", [])
