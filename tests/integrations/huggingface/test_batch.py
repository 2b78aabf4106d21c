"""Batches of Hugging Face collators: documents, labels, rows of ranks, and the loss."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from mindspeed_cp import ConfigError, Documents, Topology
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import make_config, make_model, mesh_of, whole_batch

CONFIG = make_config("llama")


def rows_of(batch: dict, documents: Any = None, rank: int = 0, ranks: int = 3, name: str = "llama", **arguments: Any) -> dict:  # fmt: skip
    """The rows of a rank, and its labels."""
    config = make_config(name)
    rows, labels = cp.planned_batch(batch, config, mesh_of(ranks, rank), "ring", documents=documents, **arguments)
    return {**rows, "labels": labels}


def assembled(batch: dict, key: str, documents: Any = None, name: str = "llama") -> torch.Tensor:
    """The rows of all ranks under a key, in the order of tokens."""
    ranks = [rows_of(batch, documents, rank, name=name) for rank in range(3)]
    return ranks[0]["plan"].plans.layout.unshard([rows[key][0][: rows["plan"].rows] for rows in ranks])


def padded() -> dict[str, torch.Tensor]:
    """Three rows with padding at the right, at the left, and none."""
    tokens = torch.arange(1, 13).reshape(3, 4)
    return {
        "input_ids": tokens,
        "labels": tokens * 5,
        "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]]),
    }


def test_rows_without_padding_are_documents() -> None:
    batch = padded()
    assert cp.documents_of_batch(batch) == Documents([3, 2, 4])
    assert assembled(batch, "input_ids").tolist() == [1, 2, 3, 7, 8, 9, 10, 11, 12]
    assert assembled(batch, "labels").tolist() == [10, 15, -100, 40, -100, 50, 55, 60, -100]
    assert assembled(batch, "position_ids").tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert cp.documents_of_batch({"input_ids": batch["input_ids"]}) == Documents([4, 4, 4])


def test_a_full_mask_keeps_labels_where_they_are() -> None:
    assert assembled(padded(), "labels", name="bert").tolist() == [5, 10, 15, 35, 40, 45, 50, 55, 60]


def test_the_flattening_collator_of_transformers_says_documents() -> None:
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": list(range(1, n + 1))} for n in (5, 1, 9)]
    plain = DataCollatorWithFlattening()(rows)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    for batch in (plain, flat):
        assert cp.documents_of_batch(batch) == Documents([5, 1, 9])
        assert assembled(batch, "input_ids").tolist() == [*range(1, 6), 1, *range(1, 10)]
        # The collator itself ignores the first token of each document; what the last one predicts is ignored here.
        assert assembled(batch, "labels").tolist() == [2, 3, 4, 5, -100, -100, *range(2, 10), -100]


def test_other_tensors_over_tokens_are_cut_with_them() -> None:
    documents = Documents([5, 8])
    weights, embeds = torch.rand(1, 13), torch.rand(1, 13, 4)
    positions = torch.arange(39).reshape(3, 1, 13)
    batch = {"inputs_embeds": embeds, "weights": weights, "position_ids": positions, "labels": None}
    assert torch.equal(assembled(batch, "weights", documents), weights[0])
    assert torch.equal(assembled(batch, "inputs_embeds", documents), embeds[0])
    for rank in range(3):
        rows = rows_of(batch, documents, rank)
        assert torch.equal(rows["position_ids"][:, 0], positions[:, 0, rows["plan"].plans.layout.tokens(rank)])
        assert rows["labels"] is None and rows["use_cache"] is False


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_loss_mask_leaves_its_tokens_out(dtype: torch.dtype) -> None:
    tokens = torch.arange(10, 19)[None]
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1]]).to(dtype)
    batch = {"input_ids": tokens, "labels": tokens, "loss_mask": mask}
    # Token i is learned by the row before it: the masks of 12 and 13, and of the first token of the second document.
    documents = Documents([4, 5])
    assert assembled(batch, "labels", documents).tolist() == [11, -100, -100, -100, 15, -100, 17, 18, -100]
    assert assembled(batch, "labels", documents, "bert").tolist() == [10, 11, -100, -100, 14, 15, -100, 17, 18]
    assert "loss_mask" not in rows_of(batch, documents)


def test_loss_masks_that_fit_no_labels_are_refused() -> None:
    tokens = torch.arange(9)[None]
    with pytest.raises(ConfigError, match="loss_mask and no labels; valid: labels as well"):
        rows_of({"input_ids": tokens, "loss_mask": tokens > 3})
    with pytest.raises(ConfigError, match="loss_mask has other values than 0 and 1; valid: 0 and 1; weights of"):
        rows_of({"input_ids": tokens, "labels": tokens, "loss_mask": tokens * 0.5})
    with pytest.raises(ConfigError, match=r"loss_mask has shape \[1, 8\]; valid: \[1, 9\]"):
        rows_of({"input_ids": tokens, "labels": tokens, "loss_mask": tokens[:, :8] > 3})


def wrong_call(rank: int, group: Any, fault: str) -> str:
    """What a rank says to a batch that only rank 1 has otherwise."""
    lengths = (9, 5, 13)
    batch = whole_batch(lengths)
    if rank == 1 and fault in ("tokens", "labels"):
        name = "input_ids" if fault == "tokens" else "labels"
        batch[name][0, [3, 4]] = batch[name][0, [4, 3]]
    model = make_model(make_config("llama"), cp.register())
    try:
        mesh = mesh_of(3, rank, group)
        model(**cp.planned_batch(batch, model.config, mesh, "ring", documents=Documents(lengths))[0])
    except ConfigError as error:
        return str(error)
    return "trains"


@pytest.mark.parametrize(
    ("fault", "says"),
    [("tokens", "batch_digest: rank 1 has"), ("labels", "batch_digest: rank 1 has"), ("none", "trains")],
)
def test_ranks_with_other_tokens_are_found(pool, fault: str, says: str) -> None:
    assert (whole_batch((9, 5, 13))["labels"][0, [3, 4]] >= 0).all()  # an exchange that a plain sum would not show
    for text in pool.run(3, wrong_call, fault):
        assert re.search(says, text)


def test_positions_of_one_row_say_documents() -> None:
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3])
    for position_ids in (positions, positions[None]):
        assert cp.documents_of_batch({"input_ids": TOKENS, "position_ids": position_ids}) == Documents([3, 2, 4])
    grid = 100 + torch.arange(27).reshape(3, 1, 9)
    batch = {"input_ids": TOKENS, "position_ids": torch.cat([positions[None, None], grid])}
    rows = rows_of(batch, ranks=1, name="qwen3")  # those of the text come first, and the model gets the others
    assert rows["plan"].plans.documents == Documents([3, 2, 4]) and torch.equal(rows["position_ids"], grid)


def test_padding_has_no_part_in_the_digest() -> None:
    packed = {"input_ids": torch.arange(1, 6)[None], "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    rows = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    wide = {
        "input_ids": torch.tensor([[7, 1, 2, 3], [7, 7, 4, 5]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]),
    }
    digests = {rows_of(batch)["plan"].batch_digest for batch in (packed, rows, wide)}
    assert len(digests) == 1
    other = rows_of({**packed, "input_ids": torch.tensor([[1, 2, 3, 5, 4]])})["plan"].batch_digest
    assert other not in digests


def test_a_rank_without_rows_has_one_of_padding() -> None:
    token = torch.ones(1, 1, dtype=torch.int64)
    for rank in range(3):
        rows = rows_of({"input_ids": token, "labels": token}, rank=rank)
        assert sorted(rows["plan"].plans.layout.token_counts.tolist()) == [0, 0, 1]
        assert rows["input_ids"].shape == (1, 1) and rows["labels"].tolist() == [[-100]]


TOKENS = torch.zeros(1, 9, dtype=torch.int64)
ERRORS = [
    ({"labels": TOKENS}, "neither input_ids nor inputs_embeds"),
    ({"input_ids": TOKENS[0]}, r"input_ids has shape \[9\]; valid: \[rows, tokens, ...\]"),
    ({"input_ids": TOKENS, "pixel_values": torch.zeros(3, 4)}, r"pixel_values is of shape \[3, 4\]; valid: a tensor \[1, 9, ...\]"),
    ({"input_ids": TOKENS, "texts": ["a"]}, "texts is a list"),
    ({"input_ids": [[0] * 9]}, 'input_ids is a list; valid: a tensor .*return_tensors="pt"'),
    ({"input_ids": TOKENS, "position_ids": [list(range(9))]}, "position_ids is a list; valid: a tensor"),
    ({"input_ids": TOKENS, "labels": [[0] * 9]}, "labels is a list; valid: a tensor"),
    ({"input_ids": TOKENS, "position_ids": torch.arange(5)[None]}, r"position_ids has shape \[1, 5\]; valid: \[1, 9\], or"),
    ({"input_ids": TOKENS, "position_ids": torch.arange(5)}, r"position_ids has shape \[5\]; valid: \[1, 9\], or"),
    ({"input_ids": TOKENS, "position_ids": torch.arange(9)}, r"the batch has Documents\(\[9\].* but documents are"),
    ({"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3]])}, "attention_mask has other values than 0 and 1"),
    ({"input_ids": TOKENS, "position_ids": torch.arange(4, 13)[None]}, "position_ids begin with 4 in a row; valid: 0, the first token of a document"),
    ({"input_ids": TOKENS[:, :7]}, r"the batch has Documents\(\[7\], .* but documents are"),
    ({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 4, 9])}, r"the batch has Documents\(\[4, 5\].* but documents are Documents\(\[3, 2, 4\]"),
    ({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 3, 5, 9]), "position_ids": torch.arange(9)[None]}, "position_ids says .*but cu_seq_lens_q says"),
    ({"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}, "padding between tokens in row 0"),
    ({"input_ids": TOKENS, "attention_mask": torch.ones(1, 1, 9, 9)}, r"attention_mask has shape \[1, 1, 9, 9\]; valid: \[1, 9\]"),
    ({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}, "but the batch has 9 tokens without padding"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "says"), ERRORS)
def test_batches_that_do_not_fit_are_refused(batch: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rows_of(batch, Documents([3, 2, 4]))


def test_shares_of_the_loss_add_up_to_the_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(1, 9, 7, generator=generator), torch.randint(0, 7, (1, 9), generator=generator)
    labels[0, [2, 4]] = -100
    whole = torch.nn.functional.cross_entropy(logits[0], labels[0])
    count = cp.count_labels([labels[:, :4], labels[:, 4:]])
    assert count == 7
    assert cp.loss(logits[:, :4], labels[:, :4], count) + cp.loss(
        logits[:, 4:], labels[:, 4:], int(count)
    ) == pytest.approx(float(whole))
    assert cp.loss(logits[:, :2], labels.new_full((1, 2), -100), 0) == 0.0
    with pytest.raises(ConfigError, match=r"logits have shape \[1, 9, 7\], labels \[1, 4\]"):
        cp.loss(logits, labels[:, :4], count)
    for labels in ([], None, [None]):
        with pytest.raises(ConfigError, match="labels has no tensor; valid: what planned_batch returns"):
            cp.count_labels(labels)
    with pytest.raises(ConfigError, match="labels has no tensor"):
        cp.loss(logits, None, count)


@pytest.mark.parametrize("count", [-5, float("nan"), float("inf"), "x"])
def test_counts_that_are_none_are_refused(count: Any) -> None:
    for given in (count, *([] if isinstance(count, str) else [torch.tensor(count), torch.tensor([1, count])]), True):
        with pytest.raises(ConfigError, match=re.escape(f"count is {given!r}; valid: a number, 0 or more")):
            cp.loss(torch.zeros(1, 2, 7), torch.zeros(1, 2, dtype=torch.int64), given)
    if count != -5:
        with pytest.raises(ConfigError, match=f"divisor is {count!r}; valid: a finite number"):
            cp.loss_share(torch.zeros(()), count)


def test_labels_beyond_the_vocabulary_are_refused() -> None:
    for label in (61, -7):
        labels = TOKENS.clone()
        labels[0, 4] = label
        with pytest.raises(ConfigError, match=f"labels has {label}; valid: 0 to 60, the model's vocabulary, or -100"):
            rows_of({"input_ids": TOKENS, "labels": labels})
        with pytest.raises(ConfigError, match=f"labels has {label}; valid: 0 to 60"):
            cp.loss(torch.zeros(1, 9, 61), labels, 9)
    packed = Documents.from_trajectories([[3, 4, 61], [3, 5]])
    with pytest.raises(ConfigError, match="packed has 61; valid: 0 to 60"):
        cp.planned_trajectories(packed, CONFIG, None)


def test_calls_without_a_plan_say_what_to_do() -> None:
    model = make_model(make_config("llama"), cp.register()).eval()
    with pytest.raises(ConfigError, match=r"attention_mask was given .*for generation .*sdpa"):
        model.generate(TOKENS, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"plan is None; valid: .*planned_batch.*sdpa"):
        model(TOKENS)
    with pytest.raises(ConfigError, match=r"plan is a ModelPlans; valid: model\(\*\*rows\)"):
        model(TOKENS, plan=cp.build_plans(CONFIG, Documents([9]), Topology()), use_cache=False)


def test_attention_of_published_sizes() -> None:
    import transformers

    mistral = cp.attention_config(transformers.MistralConfig(), 3)
    assert (mistral.heads, mistral.kv_heads, mistral.head_dim, mistral.window) == (32, 8, 128, (4095, 0))
    gemma = [cp.attention_config(transformers.Gemma3TextConfig(), layer) for layer in (0, 5)]
    assert [attention.window for attention in gemma] == [(4095, 0), None] and gemma[0].softmax_scale == 256**-0.5
    latent = cp.attention_config(transformers.DeepseekV3Config(), 0)
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.head_dim_v) == (128, 128, 192, 128)
    modern = cp.attention_config(transformers.ModernBertConfig(), 1)
    assert (modern.mask, modern.window) == ("full", (64, 64))
