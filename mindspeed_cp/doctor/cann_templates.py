"""Which kernel template CANN takes for a call of fused attention, on Atlas A2 and A3.

CANN tries the templates of an operator in the order of their priority, and takes the first that is capable of the call.
Here are the conditions under which each is, as read in public copies of ops-transformer; no device has answered. Two
copies differ: in the newer one the basic template and the unpadded one are switched off, deterministic gradients have a
basic template of their own, and the forward rewrites TND to BSH. Names are those of the sources, shortened::

    forward    flash_attention_score_tiling_general.cpp                       priority
      varlen, varlen SameAB     FlashAttentionVarLenScoreTiling (TND)               94
      SameAB                    FlashAttentionScoreTilingS1s2Bn2gs1SameAB           95
      S1s2Bn2gs1                FlashAttentionScoreTilingS1s2Bn2gs1                 96
      S1Bn2gs1                  FlashAttentionScoreTilingS1Bn2gs1                   97
      BSH: ...                  CouldConvertTND2BSH: TND of equal lengths and D = 128 becomes BSH

    gradient   flash_attention_score_grad_tiling_*.cpp
      Bn2 deterministic         ...Deterministic, s1s2_bn2.cpp                    1000
      basic                     FlashAttentionScoreGraTilingMla, ..._basic.cpp    1001
      basic deterministic       ...BasicDet, ..._basic_det.cpp                    1002
      SameAB deterministic      ...SameABDeterministic, ..._sab.cpp               1100
      unpadded                  ...UnpaddedAttension, unpadded_attension.cpp      2000
      B                         ...Ubngs1s2Bb, bngs1s2_b.cpp                     10000
      BN                        ...Ungs1s2Bbn, ngs1s2_bn.cpp                     11000
      Bn2                       ...S1s2Bn2, s1s2_bn2.cpp                         15000
      SameAB                    ...S1s2Bn2gs1s2SameAb, ..._sab.cpp               15500
      Bn2gs1s2                  ...S1s2Bn2gs1s2, s1s2_bn2gs1s2.cpp               16000
      BSH: ...                  ProcessTndToBsh: TND of equal lengths without bias is computed as BSH
"""

from __future__ import annotations

from dataclasses import dataclass

#: Copies of the sources, by what they have that the other has not.
SOURCES = ("with the basic template", "without the basic template")

VECTOR_CORES = 40  # of an Ascend 910B; others have 48
MEAN_OF_SAME_AB = 1024  # mean length from which a packed gradient is SameAB (SAB_TND_SIZE)
LONGEST_BASIC = 32768
LONGEST_SMALL_GROUP = 8192


@dataclass(frozen=True)
class CallShape:
    """What decides the template of a call.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
        layout: "TND" or "BSND".
        heads, kv_heads, head_dim, head_dim_v: of the call.
        q_lengths, kv_lengths: rows of each sequence, or batch entry.
        sparse_mode: as given.
        has_mask: an attention mask is given.
        has_bias: slopes are given (pse).
        has_dropout: keep_prob is below 1.
        deterministic: torch.use_deterministic_algorithms is on.
    """

    dtype: str
    layout: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    sparse_mode: int = 0
    has_mask: bool = False
    has_bias: bool = False
    has_dropout: bool = False
    deterministic: bool = False

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def longest(self) -> tuple[int, int]:
        """Longest sequence of queries and of keys."""
        return max(self.q_lengths), max(self.kv_lengths)

    @property
    def equal_lengths(self) -> bool:
        """True if all sequences have the same number of queries, and as many keys."""
        return len({*self.q_lengths, *self.kv_lengths}) == 1

    @property
    def mean_is_long(self) -> bool:
        """True if queries and keys have a mean length of MEAN_OF_SAME_AB or more; sequences at the end that have no
        queries do not count."""
        count = max(i + 1 for i, length in enumerate(self.q_lengths) if length)
        lengths = sum(self.q_lengths[:count]), sum(self.kv_lengths[:count])
        return min(lengths) // count >= MEAN_OF_SAME_AB


def forward_template(call: CallShape, source: str = SOURCES[0]) -> str:
    """Return the template of the forward.

    Args:
        call: the call.
        source: one of SOURCES.
    """
    if call.layout == "TND":
        rewritten = source == SOURCES[1] and _becomes_bsh(call) and call.head_dim == call.head_dim_v == 128
        if not rewritten:
            return "varlen SameAB" if _is_same_ab_varlen(call) else "varlen"
        return f"BSH: {_padded_forward(call)}"
    return _padded_forward(call)


def gradient_template(call: CallShape, source: str = SOURCES[0]) -> str:
    """Return the template of the gradient; see :func:`forward_template`."""
    if call.deterministic:
        return _deterministic_gradient(call, source)
    has_basic = source == SOURCES[0]
    packed = call.layout == "TND"
    becomes_bsh = packed and _becomes_bsh(call)
    if has_basic and _is_basic(call):
        return "basic"
    if packed and has_basic and not becomes_bsh and not call.mean_is_long:
        return "unpadded"
    prefix = "BSH: " if becomes_bsh else ""
    if not packed and (small := _small_gradient(call)):
        return small
    if (becomes_bsh or not packed) and _is_bn2(call):
        return f"{prefix}Bn2"
    if call.dtype != "fp32" and (not packed or (call.mean_is_long and not _is_small_group(call))):
        return "SameAB"
    return f"{prefix}Bn2gs1s2"


def describe_templates(calls: list[CallShape]) -> list[str]:
    """Return the templates of the calls, forward and gradient, each once in the order of the calls; where the sources
    differ, both with "or" between them."""
    names: dict[str, None] = {}
    for call in calls:
        for direction, template in (("forward", forward_template), ("gradient", gradient_template)):
            by_source = dict.fromkeys(template(call, source) for source in SOURCES)
            names[f"{direction} {' or '.join(by_source)}"] = None
    return list(names)


def _gradient_width_v(call: CallShape) -> int:
    """Width of values in the gradient: they are padded to that of keys, but for 192 and 128 without determinism."""
    keeps = (call.head_dim, call.head_dim_v) == (192, 128) and not call.deterministic
    return call.head_dim_v if keeps else call.head_dim


def _becomes_bsh(call: CallShape) -> bool:
    return call.equal_lengths and not call.has_bias and call.sparse_mode not in (7, 8)


def _is_same_ab_varlen(call: CallShape) -> bool:
    q, k = call.longest
    many = len(call.q_lengths) >= 4 and min(sum(call.q_lengths), sum(call.kv_lengths)) >= 8192 and min(q, k) >= 512
    return call.dtype != "fp32" and call.heads > 1 and (many or min(q, k) > 5120)


def _padded_forward(call: CallShape) -> str:
    _, k = call.longest
    width = call.head_dim
    if call.dtype != "fp32" and (
        ((width % 16 or width == 96) and k >= 512)
        or (k > 1024 and 128 < width < 196)
        or (width == 64 and k % 64 and 2048 < k < 18432)
    ):
        return "SameAB"
    return "S1s2Bn2gs1" if k > 1024 else "S1Bn2gs1"


def _deterministic_gradient(call: CallShape, source: str) -> str:
    if call.dtype == "fp32" or max(call.longest) < 1024:
        return "Bn2 deterministic"
    plain = call.layout == "TND" and not call.has_bias and not call.has_dropout
    width = call.head_dim
    narrow = width == call.head_dim_v and width <= 128 and width % 16 == 0
    masked = call.sparse_mode == 3 if call.has_mask else call.sparse_mode == 0
    if source == SOURCES[1] and plain and narrow and masked:
        return "basic deterministic"
    return "SameAB deterministic"


def _is_basic(call: CallShape) -> bool:
    width = call.head_dim
    masked = call.sparse_mode in (2, 3) if call.has_mask else call.sparse_mode == 0
    return (
        call.layout == "TND"
        and call.dtype != "fp32"
        and masked
        and not call.has_bias
        and not call.has_dropout
        and width == _gradient_width_v(call) <= 128
        and width % 16 == 0
        and call.q_lengths == call.kv_lengths
        and max(call.longest) <= LONGEST_BASIC
    )


def _small_gradient(call: CallShape) -> str | None:
    """Return the template of a padded call whose scores fit in one block or few, or None."""
    if call.dtype == "fp32" or call.has_bias or _gradient_width_v(call) != call.head_dim:
        return None
    q, k = call.longest
    limit = 64 * 128 // 4 * 3 if q >= 4 else 64 * 128
    if call.heads * _align(q) * _align(k) <= limit:
        return "B"
    return "BN" if call.group == 1 and k <= 1536 and q * _align(k) <= 32768 else None


def _is_bn2(call: CallShape) -> bool:
    longest, entries = max(call.longest), len(call.q_lengths) * call.kv_heads
    if longest >= 1024 or _gradient_width_v(call) != call.head_dim:
        return False
    if (call.group > 1 and entries * 2 <= VECTOR_CORES) or (entries < VECTOR_CORES and longest > 768):
        return False
    large_group = call.head_dim == 128 and call.group >= 4 and len(call.q_lengths) <= 6
    return not (large_group and not call.has_bias and not call.has_dropout and call.sparse_mode in (0, 3))


def _is_small_group(call: CallShape) -> bool:
    """True for packed calls that SameAB leaves to Bn2gs1s2: D = 128, four query heads or more for a key head."""
    return (
        call.head_dim == 128
        and call.group >= 4
        and len(call.q_lengths) <= 16
        and call.q_lengths == call.kv_lengths
        and 0 not in call.q_lengths
        and max(call.q_lengths[1:], default=0) <= LONGEST_SMALL_GROUP
        and call.sparse_mode in (0, 3)
        and not call.has_bias
        and not call.has_dropout
    )


def _align(rows: int) -> int:
    return -(-rows // 16) * 16
