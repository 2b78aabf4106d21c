"""Flags of the attention kernel and of the kind of attention."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.flag_rule import ANOTHER_MODEL, Condition, FlagRule, Outcome

STAYS, REMOVED, BY_HAND, REFUSED = Outcome.STAYS, Outcome.REMOVED, Outcome.BY_HAND, Outcome.REFUSED

_BACKEND = "the operator of attention is the key backend of the settings, by default that of the device"
_STATE = "layers that hand a state from token to token need their tokens in order on one rank"
_INDEXED = "attention to keys that an indexer chooses is not in this version"
_COMPRESSED = "attention to compressed keys is not in this version"
_SOFTMAX = "a model of softmax attention in every layer"
_WINDOW = "plans are made for the window of each layer"
_WIDTHS = "values may be narrower than keys, and nothing is padded"

#: Alternative to other flags of windows.
WINDOW_FLAG = "--window-size LEFT,0 (of Megatron 0.16 and later)"

ALIBI = Condition("ALiBi", lambda given: given.value("--position-embedding-type") == "alibi")

ATTENTION_RULES = (
    FlagRule("--attention-backend", 1, REMOVED, _BACKEND),
    FlagRule("--flash-attention-version", 1, REMOVED, _BACKEND),
    FlagRule("--use-flash-attn", 0, STAYS, "planned attention does not read it; other features of MindSpeed do"),
    FlagRule("--use-fusion-attn-v2", 0, REMOVED, _BACKEND),
    FlagRule("--shape-order", 1, REMOVED, "attention takes packed rows (TND)"),
    FlagRule("--mla-fa-without-pad", 0, REMOVED, _WIDTHS),
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
        becomes=f"{WINDOW_FLAG} in its place, and --window-attn-skip-freq for layers without a window",
    ),
    FlagRule("--softmax-type", 1, STAYS, "attention sinks: none, fixed at 0, or learned"),
    FlagRule("--linear-attention-freq", 1, REFUSED, _STATE, becomes=_SOFTMAX),
    FlagRule("--full-attention-interval", 1, REFUSED, _STATE, becomes=_SOFTMAX),
    FlagRule("--enable-dsa-indexer", 0, REFUSED, _INDEXED, becomes=ANOTHER_MODEL),
    FlagRule("--use-sparse-flash-attn", 0, REFUSED, _INDEXED, becomes=ANOTHER_MODEL),
    FlagRule("--compress-ratios", MANY, REFUSED, _COMPRESSED, becomes=_SOFTMAX),
    FlagRule(
        "--mtp-num-layers",
        1,
        BY_HAND,
        "tokens of later positions come by the plan, and before 0.16 Megatron takes no packed rows there",
        becomes="use Megatron-core 0.16 or later; where you build the GPTModel yourself, give it "
        "planned.mtp_block_spec(config, args) (docs/megatron.md)",
        when=Condition("not 0", lambda given: given.value("--mtp-num-layers") != "0"),
    ),
    FlagRule("--cuda-graph-impl", 1, STAYS, "no graph", value="none"),
)
