"""Flags of context parallelism itself, and of the other kinds of parallelism around it."""

from __future__ import annotations

from mindspeed_cp.convert.command_line import MANY
from mindspeed_cp.convert.rules.attention import ALIBI
from mindspeed_cp.convert.rules.documents import SAMPLES
from mindspeed_cp.convert.rules.flag_rule import Added, Condition, FlagRule, Given, Outcome
from mindspeed_cp.convert.rules.mindspeed_flags import MINDSPEED
from mindspeed_cp.convert.rules.model import EXPERTS, EXPERTS_OR_STAGES, ROWS
from mindspeed_cp.convert.rules.pool import PLACES_DOCUMENTS, POOL_ADDED, POOL_RULES

SETTING, STAYS, REMOVED, REFUSED = Outcome.SETTING, Outcome.STAYS, Outcome.REMOVED, Outcome.REFUSED

#: Word of an added flag in place of which the path of the settings stands.
SUITE_FILE = "SUITE_FILE"
#: The flags by which Megatron's scripts take this package's spec and settings.
SPEC_WORDS = ("--spec", "mindspeed_cp.megatron.pretrain", "spec")
PLAN_WORDS = ("--cp-plan", SUITE_FILE)


def _has_windows(given: Given) -> bool:
    return given.value("--cp-window-size", "1") not in ("0", "1")


def _is_double_ring(given: Given) -> bool:
    return given.is_ring and _has_windows(given) and given.settings.get("algorithm") != "ring"


def _rope(given: Given) -> bool:
    kind = given.value("--position-embedding-type", "learned_absolute")
    return kind == "rope" or given.has("--use-rotary-position-embeddings") or given.has("--multi-latent-attention")


def _own_spec(given: Given) -> bool:
    return not given.has("--spec") and not ALIBI.holds(given)


RING_WINDOWS = Condition("ring, `--cp-window-size` above 1", _is_double_ring)
HYBRID_WINDOWS = Condition("hybrid, above 1", lambda given: given.is_hybrid and _has_windows(given))
HYBRID = Condition("hybrid", lambda given: given.is_hybrid)
OWN_SPEC = Condition(
    "no other `--spec`, no ALiBi, no experts", lambda given: _own_spec(given) and not EXPERTS.holds(given)
)
SPEC_OF_EXPERTS = Condition(
    "experts, no other `--spec`, no ALiBi", lambda given: _own_spec(given) and EXPERTS.holds(given)
)
RESTARTS = Condition(
    "`--reset-attention-mask`, unless `--is-instruction-dataset`, `--pack` or `--neat-pack`",
    lambda given: given.has("--reset-attention-mask") and not SAMPLES.holds(given),
)

_ALGORITHM = "the algorithm is a key of the settings; MindSpeed's own wrappers of attention must be off"
_ADAPTIVE = (
    "adaptive CP reorders tokens by the mask of the batch; it is not in this version, and MindSpeed retired it in 0.18"
)
_ADAPTIVE_INSTEAD = (
    "--set algorithm=direct, which sends only what the documents let other ranks see, or the algorithm that "
    "`mindspeed-cp simulate --choose` finds for the lengths of your documents"
)
_CACHE = "keys and values are sent again in the backward, behind its computation"
_COMM = "Megatron's name of an algorithm, which is a key of the settings"
_BY_DOCUMENT = (
    "ranks of each sample by its length are Megatron's hybrid context parallelism, which is not in this version"
)
_HIERARCHICAL = (
    "--set algorithm=hierarchical, which gives each document the ranks it needs by its cost, with --cp-plan-pool those "
    "of all replicas"
)
_HIERARCHY = "the settings' algorithm makes its own groups"
_STAGES = "each stage of the pipeline gets the plan of its micro-batch"
_ONE_ALGORITHM = "one algorithm for each layer is not in this version: all layers run one plan"


_MINDSPEED_NAMES = (
    ("megatron_cp_algo", "ring"),
    ("ulysses_cp_algo", "ulysses"),
    ("hybrid_cp_algo", "hybrid"),
    ("kvallgather_cp_algo", "all_gather"),
)
_MEGATRON_NAMES = (
    ("p2p", "ring"),
    ("a2a", "ulysses"),
    ("a2a+p2p", "hybrid"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
)


def _algorithms(flag: str, arity: int, reason: str, names: tuple[tuple[str, str], ...]) -> tuple[FlagRule, ...]:
    double_ring = (("algorithm", "double_ring"),)
    return (
        FlagRule(flag, arity, SETTING, reason, names[0][0], double_ring, when=RING_WINDOWS),
        *(FlagRule(flag, arity, SETTING, reason, value, (("algorithm", name),)) for value, name in names),
    )


PARALLEL_RULES = (
    FlagRule(
        "--context-parallel-size",
        1,
        Outcome.STAYS_AS_SETTING,
        "Megatron makes the groups of ranks, and the settings must have the same number",
        settings=(("context_parallel_size", None),),
    ),
    FlagRule(
        "--cp-comm-type",
        MANY,
        REMOVED,
        "--context-parallel-algo takes precedence",
        when=Condition("beside `--context-parallel-algo`", lambda given: given.has("--context-parallel-algo")),
    ),
    *_algorithms("--context-parallel-algo", 1, _ALGORITHM, _MINDSPEED_NAMES),
    *_algorithms("--cp-comm-type", MANY, _COMM, _MEGATRON_NAMES),
    *(
        FlagRule("--context-parallel-algo", 1, REFUSED, _ADAPTIVE, name, becomes=_ADAPTIVE_INSTEAD, key="algorithm")
        for name in ("adaptive_cp_algo", "hybrid_adaptive_cp_algo")
    ),
    FlagRule(
        "--cp-comm-type", MANY, REFUSED, _ONE_ALGORITHM, becomes="--set algorithm=NAME for all layers", key="algorithm"
    ),
    FlagRule(
        "--context-parallel-algo",
        1,
        REFUSED,
        "it is for state-space layers, which need their tokens in order on one rank",
        "mamba_cp_algo",
        becomes="a model of softmax attention in every layer",
    ),
    FlagRule(
        "--context-parallel-algo",
        1,
        REFUSED,
        "there is no such algorithm in MindSpeed",
        becomes="megatron_cp_algo, ulysses_cp_algo, hybrid_cp_algo or kvallgather_cp_algo",
        key="algorithm",
    ),
    FlagRule(
        "--ulysses-degree-in-cp",
        1,
        SETTING,
        "ranks that split the heads; the others form rings",
        settings=(("ulysses_degree", None),),
        when=HYBRID,
    ),
    FlagRule("--ulysses-degree-in-cp", 1, REMOVED, "only the hybrid reads it"),
    FlagRule(
        "--hierarchical-context-parallel-sizes",
        MANY,
        SETTING,
        "the first number is the ranks that split the heads",
        settings=(("hierarchical_context_parallel_sizes", None),),
        when=HYBRID,
    ),
    FlagRule("--hierarchical-context-parallel-sizes", MANY, REMOVED, _HIERARCHY),
    FlagRule(
        "--cp-window-size",
        1,
        SETTING,
        "a ring of rings: windows of so many ranks",
        settings=(("algorithm", "double_ring"), ("cp_window_size", None)),
        when=RING_WINDOWS,
    ),
    FlagRule(
        "--cp-window-size",
        1,
        REFUSED,
        "the rings of a hybrid have no windows in this version; results do not depend on them",
        becomes="leave the flag out, or --set algorithm=double_ring",
        when=HYBRID_WINDOWS,
        key="algorithm",
    ),
    FlagRule("--cp-window-size", 1, REMOVED, "windows of one rank are a plain ring, and only rings have windows"),
    FlagRule(
        "--use-cp-send-recv-overlap",
        0,
        REMOVED,
        "transfers always run beside computation, in rings over a group for each direction (p2p_groups)",
    ),
    FlagRule(
        "--use-fused-ring-attention-update",
        0,
        SETTING,
        "partial results are merged by npu_ring_attention_update; `mindspeed-cp doctor` checks it on your device",
        settings=(("npu_merge", "ring_update"),),
    ),
    FlagRule("--megatron-cp-in-bnsd", 0, REMOVED, "the order of dimensions inside attention is the backend's"),
    FlagRule(
        "--use-ulysses-allgather-kv",
        0,
        REMOVED,
        "a rank always gets just the key/value heads that its query heads read",
    ),
    FlagRule(
        "--kv-head-repeat-before-uly-alltoall",
        0,
        REMOVED,
        "a rank always gets just the key/value heads that its query heads read, for any numbers of heads",
    ),
    FlagRule(
        "--context-parallel-kv-cache-policy",
        1,
        REFUSED,
        f"keys and values of other ranks are not kept for the backward in this version: {_CACHE}",
        becomes="leave the flag out; results are the same",
    ),
    FlagRule("--context-parallel-cache-interval", 1, REMOVED, f"{_CACHE}, in every layer"),
    FlagRule("--attention-mask-on-cpu", 0, REMOVED, "no mask of the whole context is built"),
    FlagRule("--adaptive-cp-without-coarse", 0, REMOVED, "only adaptive CP reads it"),
    FlagRule("--adaptive-cp-dynamic-attn-mask", 0, REMOVED, "every micro-batch has its own plan"),
    FlagRule("--adaptive-cp-only-reschedule", 0, REMOVED, "only adaptive CP reads it"),
    FlagRule(
        "--adaptive-cp-manually-set-mask-list",
        0,
        REFUSED,
        "masks made by hand are not in this version: a document is seen causally, as a whole or through a window",
        becomes="leave the flag out, and give the documents by cu_seqlens",
    ),
    FlagRule("--hybrid-context-parallel", 0, REFUSED, _BY_DOCUMENT, becomes=_HIERARCHICAL, key="algorithm"),
    FlagRule("--dynamic-context-parallel", 0, REFUSED, _BY_DOCUMENT, becomes=_HIERARCHICAL, key="algorithm"),
    FlagRule("--min-dynamic-context-parallel-size", 1, REMOVED, "only dynamic context parallelism reads it"),
    FlagRule(
        "--sequence-packing-scheduler",
        1,
        REFUSED,
        "Megatron's scheduler deals samples to groups of ranks that planned attention does not have",
        becomes="leave the flag out",
    ),
    FlagRule(
        "--max-seqlen-per-dp-cp-rank",
        1,
        SETTING,
        "most tokens that a rank may hold",
        settings=(("max_seqlen_per_dp_cp_rank", None),),
        when=PLACES_DOCUMENTS,
    ),
    FlagRule("--max-seqlen-per-dp-cp-rank", 1, REMOVED, "only hybrid context parallelism reads it"),
    FlagRule(
        "--tp-2d",
        0,
        REFUSED,
        "MindSpeed's 2-D tensor parallelism runs context parallelism over other groups of ranks than Megatron's",
        becomes="1-D tensor parallelism: leave out --tp-2d, --tp-x and --tp-y",
    ),
    FlagRule("--pipeline-model-parallel-size", 1, STAYS, _STAGES),
    FlagRule("--num-layers-per-virtual-pipeline-stage", 1, STAYS, _STAGES),
    FlagRule("--num-virtual-stages-per-pipeline-rank", 1, STAYS, _STAGES),
    *POOL_RULES,
    FlagRule(
        "--cp-plan",
        1,
        REFUSED,
        "the launch was converted before",
        becomes="change the settings file, or convert the launch as it was",
    ),
)

ADDED_FLAGS = (
    Added(
        ("--calculate-per-token-loss",),
        "packed documents give ranks unequal numbers of tokens, so the loss is the global sum over the global count",
    ),
    Added(
        ("--no-rope-fusion",),
        "rotary positions come from the plan",
        Condition("rotary positions", _rope),
    ),
    Added(
        ("--moe-token-dispatcher-type", "alltoall"),
        f"{ROWS}, which Megatron's default, allgather, cannot gather",
        EXPERTS_OR_STAGES,
    ),
    Added(
        ("--no-create-attention-mask-in-dataloader",),
        "a mask of the whole context for every row, which nothing would read",
    ),
    Added(
        ("--reset-position-ids",),
        "positions that restart say where documents begin",
        RESTARTS,
    ),
    Added(
        ("--cp-plan-documents",),
        "attention stays inside the documents whose positions restart",
        Condition(
            f"`--reset-attention-mask` {MINDSPEED.text}",
            lambda given: (
                MINDSPEED.holds(given)
                and given.has("--reset-attention-mask")
                and (RESTARTS.holds(given) or given.has("--reset-position-ids"))
            ),
        ),
    ),
    POOL_ADDED,
    Added(SPEC_WORDS, "layers with planned attention", OWN_SPEC),
    Added(
        SPEC_WORDS,
        "layers with planned attention; Megatron 0.12 and 0.14 refuse --spec for experts, and 0.19 needs it",
        SPEC_OF_EXPERTS,
        by_hand="with Megatron 0.19 add it to the flags; up to 0.16 leave it out: wrap_model_provider of "
        "mindspeed_cp.megatron.pretrain sets it",
    ),
    Added(
        ("--spec",),
        "ALiBi comes with the spec",
        ALIBI,
        by_hand="in a module of yours, spec = mindspeed_cp.megatron.install(YOUR_SPEC, suite, alibi=True); give --spec "
        "that module",
    ),
    Added(
        PLAN_WORDS,
        "the settings, for the arguments and the forward step that the training script takes from "
        "mindspeed_cp.megatron.pretrain (docs/megatron.md)",
    ),
)
