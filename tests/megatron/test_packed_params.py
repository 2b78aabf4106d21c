"""Batches that a data loader has cut, without a plan: when plans are made, what is kept, and what is refused."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch

from mindspeed_cp import ConfigError
from mindspeed_cp.megatron import (
    PlannedAttention,
    install,
    install_model,
    megatron_imports,
    planned_batch_from,
    planned_params,
)
from mindspeed_cp.megatron.adaptors.batch import plan_cache
from mindspeed_cp.megatron.adaptors.packed import build_plan_of_cut
from tests.megatron.gpt import VOCABULARY, Suite, build, layer_spec, megatron, transformer_config
from tests.megatron.packed import cut_batch, ends, plain_params, zigzag_rows
from tests.megatron.ranks import MegatronRanks, SilentGroup
from tests.megatron.test_core_attention import attention, plan_for

with megatron_imports():
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def on_rank(rank: int, ranks: int, **arguments: Any) -> PlannedAttention:
    """Planned attention of one of several ranks, where no message is sent."""
    module = attention(suite=Suite(context_parallel_size=1, **arguments.pop("keys", {})), **arguments)
    suite = Suite(context_parallel_size=ranks)
    module.suite = module.packed.suite = suite
    module.cp_group = SilentGroup(ranks, rank)  # type: ignore[assignment]
    return module


def test_documents_come_from_cu_seqlens(alone: None) -> None:
    module = attention()
    x = inputs(28)
    for given in (
        plain_params([7, 1, 20]),
        plain_params([7, 0, 1, 20]),
        plain_params([7, 1, 20], cu_seqlens_kv=None, cu_seqlens_q=ends([7, 1, 20]).long()),
        plain_params([7, 1, 20], cu_seqlens_q=ends([7, 1, 20])[None], cu_seqlens_kv=ends([7, 1, 20])[None]),
        plain_params([5, 1, 17], [7, 1, 20]),
    ):
        out = module(*x, None, packed_seq_params=given)
        assert torch.equal(out, module(*x, None, packed_seq_params=planned_params(plan_for(module, [7, 1, 20]), 0)))


def test_a_full_mask_takes_sequences_without_padding(alone: None) -> None:
    module = attention(attn_mask_type=AttnMaskType.no_mask)
    x = inputs(28)
    out = module(*x, None, packed_seq_params=plain_params([8, 20], [8, 20]))
    assert torch.equal(out, module(*x, None, packed_seq_params=planned_params(plan_for(module, [8, 20]), 0)))
    with pytest.raises(ConfigError, match="tokens would see the padding behind their sequence; valid: a causal mask"):
        module(*x, None, packed_seq_params=plain_params([8, 19], [8, 20]))


def test_a_micro_batch_is_planned_once_for_all_its_layers(alone: None) -> None:
    config = transformer_config(window_size=(9, 0), window_attn_skip_freq=2)
    model = install_model(build(config, install(layer_spec(config), Suite())))
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert cores[0].packed is cores[1].packed and len(cores[0].packed.attentions) == 2
    cache = plan_cache(False, build_plan_of_cut)
    params, before = plain_params([3, 7, 11, 2]), (cache.misses, cache.hits)
    tokens = torch.randint(0, VOCABULARY, (1, 23))
    for _ in range(3):  # as recomputation calls it again
        model(tokens, None, None, labels=tokens, packed_seq_params=params)
    assert (cache.misses, cache.hits) == (before[0] + 2, before[1])
    planned = cores[0].packed.planned(params, cores[0].cp_group)
    assert planned is cores[1].packed.planned(params, cores[1].cp_group) and len(planned.plans) == 2
    other = cores[0].packed.planned(plain_params([3, 7, 11, 2]), cores[0].cp_group)
    assert other is not planned and other.plans == planned.plans and cache.hits == before[1] + 2


def test_parameters_that_are_written_again_get_new_plans(alone: None) -> None:
    """A loader may use one object and one buffer for all micro-batches."""
    module, x = attention(), inputs(20)
    params = plain_params([9, 11])
    params.cu_seqlens_kv = params.cu_seqlens_q
    first = module(*x, None, packed_seq_params=params)
    params.cu_seqlens_q[1] = 4
    second = module(*x, None, packed_seq_params=params)
    assert torch.equal(second, module(*x, None, packed_seq_params=plain_params([4, 16])))
    params.cu_seqlens_q = params.cu_seqlens_kv = ends([9, 11])
    assert torch.equal(first, module(*x, None, packed_seq_params=params)) and not torch.equal(first, second)


def test_nothing_is_kept_of_parameters_that_are_gone(alone: None) -> None:
    module, x = attention(), inputs(20)
    for first in range(1, 9):
        module(*x, None, packed_seq_params=plain_params([first, 20 - first]))
    gc.collect()
    assert not len(module.packed._results)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(qkv_format="sbhd"), "packed_seq_params.qkv_format is 'sbhd'; valid: 'thd'"),
        (dict(cu_seqlens_q=None, cu_seqlens_kv=None), "packed_seq_params has no cu_seqlens_q; valid: 0, then the end"),
        (dict(cu_seqlens_kv=ends([10, 18])), "cu_seqlens_kv differs from cu_seqlens_q; valid: equal, as .* self-atten"),
        (dict(cu_seqlens_q=ends([8, 20]) + 1), "packed_seq_params.cu_seqlens_q: cu_seqlens starts at 1"),
        (dict(cu_seqlens_q=ends([8, 20]).float()), r"cu_seqlens_q is torch.float32; valid: integers"),
        (dict(cu_seqlens_q_padded=ends([8, 18])), r"sequences of \[8, 20\] tokens, but cu_seqlens_q_padded of \[8, 18"),
        (dict(cu_seqlens_q_padded=ends([28])), "as many sequences, none shorter"),
        (dict(cu_seqlens_q_padded=ends([8, 20]), cu_seqlens_kv_padded=ends([8, 24])), "cu_seqlens_kv_padded differs"),
        (dict(local_cp_size=2), r"has a context-parallel group of its own \(local_cp_size 2\); valid: None, or"),
    ],
)  # fmt: skip
def test_parameters_that_name_no_documents_are_refused(given: dict[str, Any], message: str, alone: None) -> None:
    with pytest.raises(ConfigError, match=message):
        attention()(*inputs(28), None, packed_seq_params=plain_params([8, 20], **given))


@pytest.mark.parametrize("rows", [14, 30])
def test_rows_that_are_not_those_of_cu_seqlens_are_refused(rows: int, alone: None) -> None:
    with pytest.raises(
        ConfigError, match=rf"query has shape \[{rows}, 4, 8\], but rank 0 of the plan of 28 tokens has \[28"
    ):
        attention()(*inputs(rows), None, packed_seq_params=plain_params([8, 20]))


def test_sequences_that_cannot_be_cut_are_refused(alone: None) -> None:
    with pytest.raises(
        ConfigError, match=r"sequence 1 of packed_seq_params has 18 tokens; .* context_parallel_size, 4; pad it to 20 .*"
        r"planned_batch_from, which takes any length"
    ):  # fmt: skip
        on_rank(1, 2)(*inputs(14), None, packed_seq_params=plain_params([8, 18, 6]))


def test_settings_of_plans_that_rows_of_a_loader_exclude_are_refused(alone: None) -> None:
    module = attention(suite=Suite(algorithm="hierarchical", options={"remap": "hidden"}))
    with pytest.raises(ConfigError, match="remap is 'hidden'; valid for batches that a data loader has cut: 'off'"):
        module(*inputs(28), None, packed_seq_params=plain_params([8, 20]))
    module = attention(attention_dropout=0.5)
    with pytest.raises(
        ConfigError, match=r"no dropout_seed; pass planned_batch or planned_batch_from.* plain PackedSeq"
    ):
        module(*inputs(28), None, packed_seq_params=plain_params([8, 20]))
    module.eval()
    module(*inputs(28), None, packed_seq_params=plain_params([8, 20]))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_positions_tell_a_batch_that_was_cut_in_the_other_way(rank: int, alone: None) -> None:
    """Both ways fit these lengths: nothing but the positions shows which it was."""
    module, lengths = on_rank(rank, 3), [12, 24, 6, 30]
    tokens = {"tokens": torch.arange(72)}  # also positions that run through the row
    batch, params = cut_batch(tokens, lengths, "document", 3, rank)
    planned = module.packed.planned(params, module.cp_group)
    module.packed.check_positions(planned, batch["position_ids"])
    module.packed.check_positions(planned, batch["tokens"])
    module.packed.check_positions(planned, None)
    module.packed.check_positions(planned, torch.arange(72)[None])  # of another shape: not those of the rows
    other, _ = cut_batch(tokens, lengths, "row", 3, rank)
    module.packed.check_positions(planned, mrope(batch["position_ids"]))
    for positions in (other["position_ids"], other["tokens"], mrope(other["position_ids"])):
        with pytest.raises(ConfigError, match=r"a packed row that was cut as a whole.*valid: .*planned_batch_from"):
            module.packed.check_positions(planned, positions)


def mrope(positions: torch.Tensor) -> torch.Tensor:
    """Positions of time, height and width, [3, b, s], of a row without pictures."""
    return positions.expand(3, *positions.shape)


def test_plans_are_proved_where_settings_say_so(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    proved = []
    cache = plan_cache(True, build_plan_of_cut)
    monkeypatch.setattr(cache, "_on_new_plan", proved.append)
    module = attention(suite=Suite(verify_plans=True))
    module(*inputs(28), None, packed_seq_params=plain_params([8, 20]))
    config = transformer_config()
    planned_batch_from({"tokens": torch.zeros(28)}, config, Suite(), 0)
    assert [plan.documents.lengths.tolist() for plan in proved] == [[8, 20]]


def cut_otherwise(rank: int, group: None) -> str:
    with megatron(cp=2):
        config = transformer_config(cp=2)
        model = install_model(build(config, install(layer_spec(config), Suite(context_parallel_size=2))))
        batch, params = cut_batch({"tokens": torch.zeros(32, dtype=torch.int64)}, [8, 24], "row", 2, rank)
        with pytest.raises(ConfigError) as error:
            model(batch["tokens"], batch["position_ids"], None, labels=batch["tokens"], packed_seq_params=params)
        return str(error.value)


def test_a_model_looks_at_its_positions(ranks: MegatronRanks) -> None:
    for text in ranks.run(2, cut_otherwise):
        assert text.startswith("position_ids are those of a packed row that was cut as a whole")


def megatrons_rows(rank: int, group: None) -> list[int]:
    """Rows that Megatron itself gives a rank, without sequences: those of a document need Transformer Engine."""
    with megatron(cp=2):
        others = {"cp_group": parallel_state.get_context_parallel_group(), "is_hybrid_cp": False}
        taken = inspect.signature(get_batch_on_this_cp_rank).parameters  # neither in 0.12
        others = {name: value for name, value in others.items() if name in taken}
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(32)[None]}, **others)
        rows: list[int] = batch["tokens"][0].tolist()
        return rows


def test_the_rows_of_these_tests_are_megatrons(ranks: MegatronRanks) -> None:
    for rank, rows in enumerate(ranks.run(2, megatrons_rows)):
        assert rows == zigzag_rows(0, 32, 2, rank)
