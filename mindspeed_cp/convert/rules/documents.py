"""Flags of documents, masks, positions and batches."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.attention import WINDOW_FLAG
from mindspeed_cp.convert.rules.flag_rule import Condition, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.mindspeed_flags import MINDSPEED

STAYS, REMOVED, BY_HAND, REFUSED = Outcome.STAYS, Outcome.REMOVED, Outcome.BY_HAND, Outcome.REFUSED

_FROM_PLAN = "documents come from the plan, which is made where positions restart; attention stays inside them"
_MINDSPEED_PATCHES = (
    "MindSpeed replaces Megatron's attention for it, which must be off; --cp-plan-documents says the same to the plan"
)
_OWN_BATCHES = (
    "MindSpeed replaces Megatron's attention for it, which must be off; your get_batch says where documents end"
)
_LEARNED = "positions restart in every document of a plan, and learned positions would be others than in your launch"
_MASK = "the plan's mask is causal inside each document, and no dense mask is read"
_GENERAL = "a plan's mask is causal, and general takes another one from the data"
_LLM_DATA = "MindSpeed-LLM's data sets read it, and its trainer makes the batch"
_LLM_BATCH = (
    "in a get_batch of yours, planned_batch_from(batch, config, suite) with cu_seqlens or position_ids of your data "
    "(docs/megatron.md)"
)


def _shows_fewer_keys(given: Given) -> bool:
    left, tokens = given.number("--pre-tockens", 0), given.number("--seq-length", 65536)
    return left is None or tokens is None or left < tokens


def _mask_types(flag: str) -> tuple[FlagRule, ...]:
    """Return the rows of a flag that names the mask: causal, or general, which reads a mask of the data."""
    return (
        FlagRule(flag, 1, REMOVED, _MASK, "causal"),
        FlagRule(flag, 1, REMOVED, "with --reset-attention-mask both give the same result", "general", when=RESET),
        FlagRule(flag, 1, REMOVED, "the mask of these samples is causal, too", "general", when=SAMPLES),
        FlagRule(
            flag,
            1,
            REFUSED,
            _GENERAL,
            becomes="causal; with documents of their own general and --reset-attention-mask",
        ),
    )


def _learns_positions(given: Given) -> bool:
    kind = given.value("--position-embedding-type", "learned_absolute")
    return kind == "learned_absolute" and not given.has("--use-rotary-position-embeddings")


#: Flags of data sets of MindSpeed-LLM, whose trainer makes the batches.
_SAMPLES = ("--is-instruction-dataset", "--pack", "--neat-pack")

#: Flags with which attention stays inside documents.
_KEEPS_DOCUMENTS = ("--reset-attention-mask", "--dataloader-inter-document-masking", "--cp-plan-documents")

SAMPLES = Condition(
    "beside " + ", ".join(f"`{flag}`" for flag in _SAMPLES), lambda given: any(map(given.has, _SAMPLES))
)
RESET = Condition("beside `--reset-attention-mask`", lambda given: given.has("--reset-attention-mask"))
LEARNED_POSITIONS = Condition(
    "learned positions without `--reset-position-ids`",
    lambda given: _learns_positions(given) and not given.has("--reset-position-ids"),
)

DOCUMENT_RULES = (
    FlagRule(
        "--reset-attention-mask",
        0,
        REFUSED,
        _LEARNED,
        becomes="--reset-position-ids with it, and weights that were trained so; or --position-embedding-type rope",
        when=LEARNED_POSITIONS,
    ),
    FlagRule("--reset-attention-mask", 0, REMOVED, _OWN_BATCHES, when=SAMPLES),
    FlagRule(
        "--reset-attention-mask",
        0,
        REMOVED,
        _MINDSPEED_PATCHES,
        when=MINDSPEED,
    ),
    FlagRule("--reset-attention-mask", 0, STAYS, _FROM_PLAN),
    FlagRule(
        "--reset-position-ids",
        0,
        REFUSED,
        "attention stays inside the documents whose positions restart, and would cross them here",
        becomes="--reset-attention-mask with it, or neither",
        when=Condition(
            "without `--reset-attention-mask`",
            lambda given: not any(map(given.has, _KEEPS_DOCUMENTS)),
        ),
    ),
    FlagRule("--reset-position-ids", 0, STAYS, _FROM_PLAN),
    FlagRule("--eod-mask-loss", 0, STAYS, "it masks the loss of end-of-document tokens, not attention"),
    FlagRule(
        "--fix-sub-seq-length",
        1,
        REMOVED,
        "-1 keeps the documents whole",
        value="-1",
    ),
    FlagRule(
        "--fix-sub-seq-length",
        1,
        REFUSED,
        "documents are not cut into parts of one length",
        becomes="leave the flag out, and cut them in the data or in the lengths that you give to Documents",
    ),
    *(row for flag in ("--attention-mask-type", "--cp-attention-mask-type") for row in _mask_types(flag)),
    FlagRule("--no-create-attention-mask-in-dataloader", 0, STAYS, "plans need no dense mask"),
    FlagRule("--dataloader-inter-document-masking", 0, STAYS, "its cu_seqlens give the documents"),
    FlagRule("--sft", 0, STAYS, "the cu_seqlens of its packed batches give the documents"),
    FlagRule("--variable-seq-lengths", 0, STAYS, "stages of a pipeline tell each other the numbers of their rows"),
    FlagRule("--pack", 0, BY_HAND, _LLM_DATA, becomes=_LLM_BATCH),
    FlagRule("--neat-pack", 0, BY_HAND, _LLM_DATA, becomes=_LLM_BATCH),
    FlagRule("--is-instruction-dataset", 0, BY_HAND, _LLM_DATA, becomes=_LLM_BATCH),
    FlagRule(
        "--is-pairwise-dataset",
        0,
        REFUSED,
        "MindSpeed-LLM's trainer of pairs (DPO) makes batches and losses of its own, which carry no plan",
        becomes="a script of your own with planned_batch_from (docs/megatron.md)",
    ),
    FlagRule(
        "--yaml-cfg",
        1,
        BY_HAND,
        "Megatron reads its flags from this file, which is not converted",
        becomes="convert its flags by giving them behind --; the section context_parallel_suite may stand in the file",
    ),
    FlagRule(
        "--position-embedding-type",
        1,
        Outcome.REPLACED,
        "Megatron has no ALiBi: the biases come with the spec",
        value="alibi",
        becomes="none",
    ),
    FlagRule(
        "--position-embedding-type",
        1,
        REFUSED,
        "Megatron's data sets have no positions of time, height and width",
        value="mrope",
        becomes="a script of your own with planned_batch_from (docs/megatron.md), or rope",
    ),
    FlagRule(
        "--position-embedding-type",
        1,
        REFUSED,
        "relative position biases, of T5, are not in this version",
        value="relative",
        becomes="rope, alibi by install(spec, suite, alibi=True), or none",
    ),
    FlagRule("--position-embedding-type", 1, STAYS, "positions are counted from 0 in each document"),
    FlagRule(
        "--mrope-section",
        MANY,
        REFUSED,
        "Megatron's data sets have no positions of time, height and width",
        becomes="a script of your own with planned_batch_from (docs/megatron.md), or --position-embedding-type rope",
    ),
    FlagRule(
        "--use-fused-rotary-pos-emb",
        0,
        STAYS,
        "MindSpeed's operator rotates by the positions of the plan",
    ),
    FlagRule("--no-rope-fusion", 0, STAYS, "rotary positions come from the plan"),
    FlagRule(
        "--alibi-fusion-attn-type", 1, REMOVED, "the NPU backend gives the kernel slopes and positions (npu_alibi)"
    ),
    FlagRule("--square-alibi-mask", 0, REMOVED, "biases are computed from positions, not read from a tensor"),
    FlagRule("--fill-neg-inf", 0, REMOVED, "the plan masks later tokens"),
    FlagRule("--alibi-diagonal-opposite", 0, REMOVED, "it changes biases of later tokens alone, which the plan masks"),
    FlagRule(
        "--pre-tockens",
        1,
        REFUSED,
        "it hides keys further back, which MindSpeed's kernels read and a plan does not",
        becomes=f"{WINDOW_FLAG}, from which plans are made",
        when=Condition("less than `--seq-length`", _shows_fewer_keys),
    ),
    FlagRule("--pre-tockens", 1, REMOVED, "it hides nothing: it is not less than --seq-length"),
    FlagRule("--next-tockens", 1, REMOVED, "a token sees no later one", value="0"),
    FlagRule(
        "--next-tockens",
        1,
        REFUSED,
        "it shows later tokens, and the mask of a GPT is causal",
        becomes="0, or leave it out",
    ),
    *(
        FlagRule("--sparse-mode", 1, REMOVED, "the backend chooses the kernel's mask for each tile", value=value)
        for value in ("0", "2", "3")
    ),
    FlagRule(
        "--sparse-mode",
        1,
        REFUSED,
        "it is not a causal mask",
        becomes=f"leave it out; for a window {WINDOW_FLAG}",
    ),
)
