"""Planned attention beside the real MindSpeed, whose source tree the environment variable MINDSPEED names, over the stand-in.

MindSpeed's adaptor patches torch and Megatron for the rest of a process, so that it is imported in the ranks alone.
Fused operators that the stand-in lacks (norm, swiglu, rotation) are PyTorch's here, and counted: what is tested is which
function is called on which rows, not what a kernel computes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from mindspeed_cp.convert import convert_script
from tests.npu.ranks import Run

LENGTHS = (37, 0, 5, 1, 64, 2, 23)
VOCABULARY = 96
FUSED = ("--use-fused-rotary-pos-emb", "--use-fused-rmsnorm", "--use-fused-swiglu")
LATENT: dict[str, Any] = dict(
    multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6,
    rope_type="rope", num_query_groups=4,
)  # fmt: skip
LOCAL = ("--transformer-impl", "local")
#: Parameters that Transformer Engine's layers have under another name.
RENAMED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
CALLS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def tree() -> str:
    path = os.environ.get("MINDSPEED")
    if not path:
        pytest.skip("MINDSPEED names no source tree of MindSpeed")
    if importlib.util.find_spec("triton") is None:
        pytest.skip(f"triton is not installed, which {path} imports (mindspeed/ops/triton)")
    return str(Path(path).resolve())


def without_graphs() -> None:
    """Stand in for torchair, which compiles graphs by libraries of CANN that the stand-in lacks; nothing here compiles."""
    torchair, ge = MagicMock(name="torchair"), ModuleType("torchair.ge")
    vars(ge).update(Tensor=object, TensorSpec=object, DataType=MagicMock())
    torchair.ge, torchair.register_fx_node_ge_converter = ge, lambda operator: lambda function: function
    sys.modules.update({"torchair": torchair, "torchair.ge": ge})


def import_mindspeed(tree: str, flags: tuple[str, ...]) -> None:
    """Import its adaptor as a training script with these flags does, and give it the operators that the stand-in lacks."""
    sys.path[:0] = [tree, *filter(None, [os.environ.get("MEGATRON_LM")])]
    sys.argv = ["pretrain_gpt.py", *flags]
    without_graphs()
    import mindspeed.megatron_adaptor  # noqa: F401
    import torch_npu
    from mindspeed.ops import npu_rotary_position_embedding as rotary

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            CALLS[name] += 1
            return function(*args, **kwargs)

        return call

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None

    def swiglu(x: torch.Tensor, dim: int) -> torch.Tensor:
        gate, value = x.chunk(2, dim)
        return torch.nn.functional.silu(gate) * value

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
        assert x.dim() == 4 and x.numel() and mode == 0
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    torch_npu.npu_rms_norm, torch_npu.npu_swiglu = counted("norm", norm), counted("swiglu", swiglu)
    operators = SimpleNamespace(npu_rotary_position_embedding=counted("rotary", rotate))
    rotary.rope_op_builder = SimpleNamespace(load=lambda: operators)


def step(rank: int, size: int, tree: str | None, flags: tuple[str, ...], model: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward of a small GPT: sum of the losses, gradients of this rank's rows, calls of MindSpeed."""
    if tree is not None:
        import_mindspeed(tree, flags)
    from mindspeed_cp import Documents, Topology, build_plan
    from mindspeed_cp.config import SuiteSettings
    from mindspeed_cp.megatron import (
        attention_config,
        install,
        install_model,
        local_spec,
        megatron_compat,
        megatron_imports,
        megatron_on,
        planned_batch,
        shift_labels,
    )

    with megatron_imports():
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    device = torch.device("npu", rank)
    with megatron_on(device) if tree is None else nullcontext(), megatron_compat():
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        kind = MLATransformerConfig if model else TransformerConfig
        # Fused activations with MindSpeed alone: Megatron would compile its own.
        settings: dict[str, Any] = dict(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
            context_parallel_size=size, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
            normalization="RMSNorm", add_bias_linear=False, calculate_per_token_loss=True, init_method_std=0.2,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=tree is not None,
            apply_rope_fusion=False,
        )  # fmt: skip
        config = kind(**{**settings, **model})
        suite = SuiteSettings(context_parallel_size=size, algorithm="ring")
        layers = local_spec(config)
        if tree is not None and "local" not in flags:  # as a launch has it without --transformer-impl
            layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
        spec = install(layers, suite)
        torch.manual_seed(7)
        gpt = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=256, position_embedding_type="rope")
        install_model(gpt.to(device))
        documents = Documents(LENGTHS)
        tokens = torch.randint(0, VOCABULARY, (documents.tokens,), generator=torch.Generator().manual_seed(1))
        labels, mask = shift_labels(tokens, documents)
        plan = build_plan(documents, Topology(1, size), attention_config(config), "ring")
        batch, params = planned_batch({"tokens": tokens, "labels": labels, "loss_mask": mask}, plan, rank)
        batch = {name: value.to(device) for name, value in batch.items()}
        losses = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
        total = (losses.float() * batch["loss_mask"]).sum()
        total.backward()
        norm = type(gpt.decoder.final_layernorm)
        return {
            "loss": float(total),
            "gradients": {name: p.grad.cpu().numpy() for name, p in gpt.named_parameters() if p.grad is not None},
            "calls": dict(CALLS),
            "norm": norm.__module__,
        }


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ({}, (*FUSED, *LOCAL)),
        ({}, LOCAL),
        ({}, FUSED),
        (LATENT, (*FUSED, *LOCAL, "--multi-latent-attention")),
    ],
    ids=["rotary, fused", "rotary", "rotary, fused, transformer engine", "latent, fused"],
)
def test_a_step_equals_megatrons_without_mindspeed(
    model: dict[str, Any], flags: tuple[str, ...], tree: str, ranks: Callable[..., Run]
) -> None:
    scaled = (
        {**model, "mscale_all_dim": 1.0} if model else model
    )  # MindSpeed's latent layers scale by mscale, which is 1
    (alone,) = ranks(1, step, None, (), scaled).values()
    base = ("--context-parallel-size", "2", "--position-embedding-type", "rope")
    pair = ranks(2, step, tree, (*base, *flags), model).values()
    assert sum(result["loss"] for result in pair) == pytest.approx(alone["loss"], rel=1e-5)
    for name, gradient in alone["gradients"].items():
        name = name if name in pair[0]["gradients"] else renamed(name)
        total = sum(result["gradients"][name] for result in pair)
        np.testing.assert_allclose(total, gradient, rtol=0, atol=1e-5 * float(np.abs(gradient).max()), err_msg=name)
    for result in pair:
        assert result["norm"].startswith("mindspeed.") and result["calls"]["norm"] and result["calls"]["swiglu"]
        assert bool(result["calls"].get("rotary")) == (FUSED[0] in flags)


def renamed(name: str) -> str:
    """Name of a parameter in a layer of Transformer Engine."""
    old = next(old for old in RENAMED if name.endswith(old))
    return name.removesuffix(old) + RENAMED[old]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--reset-attention-mask", "Attention.forward is replaced by mindspeed.core.transformer.flash_attention"),
        ("--unaligned-linear", "Attention.__init__ is replaced by mindspeed.core.transformer.attention"),
    ],
)
def test_what_the_tree_replaces_is_refused(flag: str, words: str, tree: str, ranks: Callable[..., Run]) -> None:
    message = ranks(1, refusal, tree, ("--context-parallel-size", "2", flag)).values()[0]
    if message.startswith("lacks "):
        pytest.skip(f"{flag} {message}")
    assert words in message


def test_the_converted_launch_of_the_page_is_accepted(tree: str, ranks: Callable[..., Run], tmp_path: Path) -> None:
    """By the parsers of Megatron and MindSpeed, and by the checks of mindspeed_cp.megatron.pretrain."""
    if importlib.util.find_spec("megatron.training") is None and "MEGATRON_LM" not in os.environ:
        pytest.skip("megatron.training is not installed, and MEGATRON_LM names no source tree of Megatron-LM")
    page = (Path(__file__).parents[2] / "docs" / "mindspeed.md").read_text("utf-8")
    (script,) = (
        text for text in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "torchrun" in text
    )
    (tmp_path / "launch.sh").write_text(script)
    (tmp_path / "suite.yaml").write_text("context_parallel_suite:\n  algorithm: ulysses\n")
    flags = convert_script(tmp_path / "launch.sh", output=str(tmp_path / "suite.yaml"))[1].flags
    assert "--cp-plan-documents" in flags
    (message,) = ranks(1, accepted, tree, flags).values()
    if message.startswith("lacks "):
        pytest.skip(message)
    assert message == "accepted"
    (message,) = ranks(
        1, accepted, tree, (*flags, "--context-parallel-algo", "hybrid_cp_algo", "--ulysses-degree-in-cp", "2")
    ).values()
    assert message.startswith("context_parallel_algo is 'hybrid_cp_algo'")


def accepted(rank: int, size: int, tree: str, flags: tuple[str, ...]) -> str:
    """What suite_of says of the arguments that Megatron and MindSpeed parse."""
    os.environ.update(WORLD_SIZE="8", CUDA_DEVICE_MAX_CONNECTIONS="1")  # as the script and torchrun set them
    try:
        import_mindspeed(tree, flags)
        from megatron.training.arguments import parse_args, validate_args
    except ModuleNotFoundError as error:
        return f"lacks {error.name}, which Megatron or MindSpeed imports"
    from mindspeed_cp import ConfigError
    from mindspeed_cp.megatron import pretrain as planned

    args = validate_args(parse_args(planned.add_arguments), {})
    try:
        suite = planned.suite_of(args)
    except ConfigError as error:
        return str(error)
    assert (suite.algorithm, suite.context_parallel_size) == ("ulysses", 4)
    return "accepted"


def refusal(rank: int, size: int, tree: str, flags: tuple[str, ...]) -> str:
    """The error of check_mindspeed, or what this environment lacks for MindSpeed to import its patches."""
    try:
        import_mindspeed(tree, flags)
    except ModuleNotFoundError as error:
        return f"lacks {error.name}, which MindSpeed imports for it"
    from mindspeed_cp import ConfigError
    from mindspeed_cp.megatron.mindspeed_compat import check_mindspeed

    try:
        check_mindspeed()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"
