"""planned_batch_from: whatever says where documents end gives the same plan; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_cp import ConfigError, Documents, Topology, build_plan
from mindspeed_cp.megatron import layer_attentions, megatron_imports, planned_batch, planned_batch_from
from mindspeed_cp.megatron.adaptors.batch import plan_cache
from tests.megatron.gpt import Suite, transformer_config
from tests.megatron.packed import ends, plain_params

with megatron_imports():
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

LENGTHS = [7, 1, 12, 5, 7]  # two rows of 20 and 12 would cut none, rows of 16 would
EOD = 3


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def with_eods(lengths: list[int]) -> torch.Tensor:
    tokens = torch.arange(10, 10 + sum(lengths))
    tokens[np.cumsum(lengths) - 1] = EOD
    return tokens


TOKENS = with_eods(LENGTHS)

#: Batches that tell the documents LENGTHS, with further arguments.
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cu_seqlens": ({"cu_seqlens": ends(LENGTHS)}, {}),
    "cu_seqlens of one row, with its filling": ({"cu_seqlens": ends([*LENGTHS, 0, 0, 0])[None]}, {}),
    "cu_seqlens_q and its likes": ({"cu_seqlens_q": ends(LENGTHS).numpy(), "cu_seqlens_kv": ends(LENGTHS)}, {}),
    "two names of the same": ({"cu_seqlens": ends(LENGTHS)[None], "cu_seqlens_q": ends(LENGTHS)}, {}),
    "padded": ({"cu_seqlens": ends([6, 1, 12, 4, 5]), "cu_seqlens_padded": ends(LENGTHS)}, {}),
    "packed_seq_params": ({"packed_seq_params": plain_params(LENGTHS)}, {}),
    "positions": ({"position_ids": positions(LENGTHS)}, {}),
    "eod": ({}, {"eod": EOD}),
    "eod, positions that only rise": ({"position_ids": torch.arange(32)[None]}, {"eod": EOD}),
    "all": (
        {
            "cu_seqlens": ends(LENGTHS), "packed_seq_params": plain_params(LENGTHS), "max_seqlen": torch.tensor([12]),
            "position_ids": positions(LENGTHS)[None], "local_cp_size": None, "attention_mask": None,
        },
        {"eod": EOD},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_batch_of_these_documents(source: str, rank: int) -> None:
    own, arguments = SOURCES[source]
    config, suite = transformer_config(cp=3), Suite(context_parallel_size=3)
    whole = {"tokens": TOKENS, "labels": TOKENS.roll(-1), "loss_mask": torch.rand(32)}
    batch, params = planned_batch_from({**whole, **own}, config, suite, rank, dropout_seed=7, **arguments)
    plan = build_plan(Documents(LENGTHS), Topology(1, 3), layer_attentions(config)[0])
    expected, expected_params = planned_batch(whole, plan, rank)
    assert {name for name, value in batch.items() if value is not None} == set(expected)
    for name, value in expected.items():
        assert torch.equal(batch[name], value) and batch[name].dtype == value.dtype, name
    assert params.plan.layout.same_as(plan.layout)
    assert (params.rank, params.dropout_seed) == (rank, 7)
    assert params.cu_seqlens_q.tolist() == expected_params.cu_seqlens_q.tolist()


def test_rows_are_documents_where_nothing_else_is_said() -> None:
    tokens = torch.arange(24).reshape(2, 12)
    config, suite = transformer_config(cp=2), Suite(context_parallel_size=2)
    for own in ({}, {"position_ids": torch.arange(12).expand(2, 12)}):
        batch, params = planned_batch_from({"input_ids": tokens, **own}, config, suite, 1)
        assert params.layout.documents == Documents([12, 12])
        assert batch["input_ids"].tolist() == [[*range(3, 9), *range(15, 21)]]
        assert batch["position_ids"].tolist() == [[*range(3, 9), *range(3, 9)]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_eods_are_read_as_megatrons_data_set_reads_them(numbers: list[int]) -> None:
    """Several in a row, and one at the end, too."""
    tokens = torch.tensor(numbers)
    hidden, _, position_ids = _get_ltor_masks_and_position_ids(tokens, 0, True, True, False, True)
    documents = Documents.from_eod(tokens, 0)
    doc = documents.document_of(np.arange(len(numbers)))
    assert np.array_equal(~hidden[0].numpy(), np.tril(doc[:, None] == doc))
    assert Documents.from_position_ids(position_ids) == documents


def test_tensors_with_further_dimensions_are_cut_and_others_passed_through() -> None:
    tokens = torch.arange(24).reshape(2, 12)
    embeddings, pixels = torch.randn(2, 12, 3, 2), torch.randn(4, 5)
    config, suite = transformer_config(cp=2), Suite(context_parallel_size=2)
    whole = {"tokens": tokens, "embeddings": embeddings, "pixels": pixels, "dataset_id": 3, "labels": None}
    batch, _ = planned_batch_from(whole, config, suite, 0, pass_through=["pixels", "dataset_id"])
    assert torch.equal(batch["embeddings"][0], embeddings.flatten(0, 1)[batch["tokens"][0]])
    assert batch["pixels"] is pixels and batch["dataset_id"] == 3 and batch["labels"] is None
    for name in ("pixels", "dataset_id"):
        with pytest.raises(
            ConfigError, match=rf"{name} of the batch .* 2 rows of 12 tokens; .*pass_through=\['{name}'\]"
        ):
            planned_batch_from({"tokens": tokens, name: whole[name]}, config, suite, 0)


def test_a_stage_without_tokens_gets_the_plan_from_cu_seqlens() -> None:
    batch, params = planned_batch_from(
        {"tokens": None, "labels": None, "cu_seqlens": ends(LENGTHS)[None]}, transformer_config(), Suite()
    )
    assert params.layout.documents == Documents(LENGTHS) and batch["tokens"] is None
    assert batch["position_ids"].tolist() == [positions(LENGTHS).tolist()]
    with pytest.raises(
        ConfigError, match="the batch has neither tokens nor cu_seqlens; valid: one of them on every pip"
    ):
        planned_batch_from({"tokens": None}, transformer_config(), Suite())


def test_equal_documents_are_planned_once() -> None:
    cache = plan_cache(False)
    whole = {"tokens": torch.arange(61), "cu_seqlens": ends([20, 41])}
    _, first = planned_batch_from(whole, transformer_config(), Suite())
    before = cache.misses
    _, second = planned_batch_from({**whole, "tokens": torch.arange(61) + 1}, transformer_config(), Suite())
    assert second.plan is first.plan and second is not first and cache.misses == before


@pytest.mark.parametrize(
    ("own", "arguments", "message"),
    [
        ({"cu_seqlens": ends([8, 24])}, {"eod": EOD}, r"cu_seqlens of the batch gives Documents\(\[8, 24\], .* but eod 3 D"),
        ({"position_ids": positions([8, 24])}, {"eod": EOD}, r"position_ids of the batch gives .*, but eod 3 Documents"),
        ({"cu_seqlens": ends([8, 24]), "packed_seq_params": plain_params(LENGTHS)}, {}, "but packed_seq_params Docume"),
        ({"cu_seqlens": ends([8, 24]), "position_ids": positions(LENGTHS)}, {}, "but position_ids Documents.* leave out"),
        ({"position_ids": torch.arange(1, 33)}, {}, r"position_ids\[0\] is 1, the first of a row"),
        ({"position_ids": torch.zeros(3, 1, 32)}, {}, r"position_ids is of shape \[3, 1, 32\], but mrope_section is None"),
        ({"position_ids": torch.zeros(2, 1, 1, 16)}, {}, r"position_ids has shape \[2, 1, 1, 16\]; valid: .* for mrope"),
        ({"position_ids": torch.arange(16)}, {}, r"position_ids of the batch has shape \[16\], but the batch has 1 rows"),
        ({"cu_seqlens": ends([8, 24]), "cu_seqlens_q": ends(LENGTHS)}, {}, "cu_seqlens of the batch differs from cu_seq"),
        (
            {"cu_seqlens": ends([9, 20]), "cu_seqlens_padded": ends([9, 23]), "cu_seqlens_q_padded": ends([12, 20])}, {},
            "cu_seqlens_padded of the batch differs from cu_seqlens_q_padded, another name of the same; valid: equal",
        ),
        ({"cu_seqlens": ends([8, 23])}, {}, "cu_seqlens of the batch ends at 31 tokens, but the batch has 1 rows of 32"),
        ({"cu_seqlens": torch.stack([ends([8])] * 2)}, {}, r"the batch has cu_seqlens \[2, 2\]; valid: \[documents \+ 1"),
        ({"attention_mask": torch.zeros(1, 1, 32, 32)}, {}, r"an attention_mask of shape \[1, 1, 32, 32\]; valid: None"),
        ({"local_cp_size": torch.tensor(2)}, {}, "the batch has a local_cp_size; valid: None, since a plan already"),
        ({"lengths": torch.tensor([8, 24])}, {}, r"lengths of the batch has shape \[2\], and the batch has 1 rows of 32"),
        ({"tokens": None}, {"eod": EOD}, "eod is 3, but the batch has no tokens and no input_ids; leave eod out"),
        ({"packed_seq_params": ends(LENGTHS)}, {}, "packed_seq_params of the batch is a Tensor; valid: Megatron's Pack"),
    ],
)  # fmt: skip
def test_a_batch_that_contradicts_itself_is_refused(
    own: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    whole = {"tokens": TOKENS, "labels": TOKENS}
    with pytest.raises(ConfigError, match=message):
        planned_batch_from({**whole, **own}, transformer_config(), Suite(), **arguments)


def test_rows_with_ends_of_their_own_must_be_filled() -> None:
    two = torch.stack([ends([8, 8]), ends([8, 7])])
    with pytest.raises(ConfigError, match="cu_seqlens: row 1 ends at 15 tokens; valid: 16, the length of a row"):
        planned_batch_from({"tokens": TOKENS.reshape(2, 16), "cu_seqlens": two}, transformer_config(), Suite())


def test_a_planned_batch_is_not_planned_again() -> None:
    batch, params = planned_batch_from({"tokens": TOKENS}, transformer_config(), Suite())
    with pytest.raises(
        ConfigError, match=r"packed_seq_params of the batch is a PlannedBatchParams; .* planned already"
    ):
        planned_batch_from({**batch, "packed_seq_params": params}, transformer_config(), Suite())


def test_a_missing_or_wrong_rank_is_refused() -> None:
    whole = {"tokens": TOKENS}
    with pytest.raises(ConfigError, match=r"rank is None before initialize_model_parallel; valid: .* 0 to 1"):
        planned_batch_from(whole, transformer_config(cp=2), Suite(context_parallel_size=2))
    with pytest.raises(ConfigError, match="rank is 2, but the plan has ranks 0 to 1"):
        planned_batch_from(whole, transformer_config(cp=2), Suite(context_parallel_size=2), 2)
