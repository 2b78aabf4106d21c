"""Flags of the attention kernel and of the kind of attention."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.flag_rule import Condition, FlagRule, Outcome

STAYS, REMOVED, BY_HAND, REFUSED = Outcome.STAYS, Outcome.REMOVED, Outcome.BY_HAND, Outcome.REFUSED

_BACKEND = "the operator of attention is the key backend of the settings, by default that of the device"
_SINK = "attention sinks are not in this version"
_SOFTMAX_ONLY = "only layers of softmax attention are planned in this version"
_STATE = "layers that hand a state from token to token need their tokens in order on one rank"
_INDEXED = "attention to keys that an indexer chooses is not in this version"
_COMPRESSED = "attention to compressed keys is not in this version"
_WITHOUT = "leave the flag out"
_WINDOW = "plans are made for the window of each layer"
_WIDTHS = "values may be narrower than keys, and nothing is padded"

ALIBI = Condition("ALiBi", lambda given: given.value("--position-embedding-type") == "alibi")

ATTENTION_RULES = (
    FlagRule("--attention-backend", 1, REMOVED, _BACKEND),
    FlagRule("--flash-attention-version", 1, REMOVED, _BACKEND),
    FlagRule("--use-flash-attn", 0, STAYS, "planned attention does not read it; other features of MindSpeed do"),
    FlagRule("--use-fusion-attn-v2", 0, REMOVED, _BACKEND),
    FlagRule("--shape-order", 1, REMOVED, "attention takes packed rows (TND)"),
    FlagRule("--mla-fa-without-pad", 0, REMOVED, _WIDTHS),
    FlagRule("--use-kitchen-attention", 0, REFUSED, "it replaces the attention operator", becomes=_WITHOUT),
    FlagRule(
        "--spec",
        MANY,
        BY_HAND,
        "Megatron takes one spec, and this one is not ours; ALiBi comes with the spec",
        becomes="in a module of yours, spec = mindspeed_cp.megatron.install(YOUR_SPEC, suite, alibi=True); give --spec "
        "that module",
        when=ALIBI,
    ),
    FlagRule(
        "--spec",
        MANY,
        BY_HAND,
        "Megatron takes one spec, and this one is not ours",
        becomes="in a module of yours, spec = mindspeed_cp.megatron.install(YOUR_SPEC, suite); give --spec that module",
    ),
    FlagRule("--window-size", 1, STAYS, _WINDOW),
    FlagRule("--window-attn-skip-freq", 1, STAYS, _WINDOW),
    FlagRule(
        "--sliding-window-size",
        1,
        REFUSED,
        "MindSpeed-LLM hands the window to its own kernels, and a plan would not see it",
        becomes="--window-size LEFT,0 in its place, and --window-attn-skip-freq for layers without a window",
    ),
    FlagRule("--softmax-type", 1, STAYS, "softmax without a sink", value="vanilla"),
    FlagRule("--softmax-type", 1, REFUSED, _SINK, becomes="vanilla"),
    FlagRule("--qk-clip", 0, REFUSED, "the largest logit is not reported", becomes="--qk-layernorm"),
    FlagRule("--log-max-attention-logit", 0, REFUSED, "the largest logit is not reported", becomes=_WITHOUT),
    FlagRule("--fp8-dot-product-attention", 0, REFUSED, "attention runs in the dtype of q, k and v", becomes=_WITHOUT),
    FlagRule("--fp8-multi-head-attention", 0, REFUSED, "attention runs in the dtype of q, k and v", becomes=_WITHOUT),
    FlagRule("--mla-down-proj-fusion", 0, REFUSED, "it rotates in a projection that is not replaced", becomes=_WITHOUT),
    FlagRule(
        "--tp-comm-overlap", 0, REFUSED, "its buffers have the same number of rows on all ranks", becomes=_WITHOUT
    ),
    FlagRule("--experimental-attention-variant", 1, REFUSED, _SOFTMAX_ONLY, becomes=_WITHOUT),
    *(
        FlagRule(flag, arity, REFUSED, _STATE, becomes="a model of softmax attention in every layer")
        for flag, arity in (
            ("--is-hybrid-model", 0),
            ("--hybrid-attention-ratio", 1),
            ("--hybrid-override-pattern", 1),
            ("--hybrid-layer-pattern", 1),
            ("--linear-attention-freq", 1),
            ("--full-attention-interval", 1),
        )
    ),
    FlagRule("--enable-dsa-indexer", 0, REFUSED, _INDEXED, becomes=_WITHOUT),
    FlagRule("--use-sparse-flash-attn", 0, REFUSED, _INDEXED, becomes=_WITHOUT),
    FlagRule("--compress-ratios", MANY, REFUSED, _COMPRESSED, becomes="a model of softmax attention in every layer"),
    FlagRule(
        "--mtp-num-layers",
        1,
        BY_HAND,
        "tokens of later positions come by the plan, and before 0.16 Megatron takes no packed rows there",
        becomes="use Megatron-core 0.16 or later; where you build the GPTModel yourself, give it "
        "planned.mtp_block_spec(config, args) (docs/megatron.md)",
        when=Condition("not 0", lambda given: given.value("--mtp-num-layers") != "0"),
        is_read=True,
    ),
    *(
        FlagRule(flag, 0, REFUSED, "every micro-batch has its own plan and cannot be replayed", becomes=_WITHOUT)
        for flag in ("--enable-cuda-graph", "--external-cuda-graph")
    ),
    FlagRule("--cuda-graph-impl", 1, STAYS, "no graph", value="none"),
    FlagRule(
        "--cuda-graph-impl", 1, REFUSED, "every micro-batch has its own plan and cannot be replayed", becomes="none"
    ),
    FlagRule("--flash-decode", 0, REFUSED, "it is for generation", becomes="a launch with the original spec"),
    FlagRule("--cache-mla-latents", 0, REFUSED, "it is for generation", becomes="a launch with the original spec"),
    FlagRule(
        "--use-legacy-models",
        0,
        REFUSED,
        "models of Megatron's legacy folder have no spec",
        becomes="leave the flag out (in MindSpeed-LLM --use-mcore-models)",
    ),
)
