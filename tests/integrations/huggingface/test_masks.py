"""Masks that a wrapper builds: each is an error or exactly what the plan computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import Tensor
from transformers import masking_utils as hf

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.integrations import huggingface as cp
from mindspeed_cp.integrations.huggingface import attention as attention_module
from mindspeed_cp.integrations.huggingface.masks import ModelMask, check_mask, compared_pairs
from mindspeed_cp.plan import AttentionConfig
from tests.integrations.huggingface.models import make_config, make_model, mesh_of, names, whole_batch

#: Of full_attention and sliding_attention: keyword arguments of create_*_mask, or another maker of masks.
Change = Callable[[np.ndarray], dict[str, Any]]
WINDOW = 7


def every(**arguments: Callable[[np.ndarray], Any]) -> Change:
    """Arguments of the masks of all layers, made from the tokens of a rank's rows."""
    return lambda tokens: {name: make(tokens) for name, make in arguments.items()}


def either(seen: Callable[..., Any]) -> Change:
    return every(or_mask_function=lambda tokens: seen)


def both(seen: Callable[..., Any]) -> Change:
    return every(and_mask_function=lambda tokens: seen)


def block_ids(*spans: tuple[int, int]) -> Callable[[np.ndarray], Tensor]:
    def ids(tokens: np.ndarray) -> Tensor:
        out = np.full(len(tokens), -1)
        for number, (first, last) in enumerate(spans):
            out[(tokens >= first) & (tokens < last)] = number
        return torch.from_numpy(out)[None]

    return ids


def rows_of(values: Callable[[np.ndarray], np.ndarray], see: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A function that compares values of the rows of query and key."""

    def make(tokens: np.ndarray) -> Callable[..., Tensor]:
        x = torch.from_numpy(values(tokens))[None]
        return lambda b, h, q, k: see(x[b, q], x[b, k])

    return make


def random_table(seed: int, tokens: np.ndarray) -> Callable[..., Tensor]:
    table = torch.rand(64, 64, generator=torch.Generator().manual_seed(seed)) < 0.5
    return lambda b, h, q, k: table[q, k]


def hashed(factor: int, modulus: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q * factor + k * k) % modulus != 0


def failing(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
    return k <= q + q.tolist()


BLOCKS: list[tuple[tuple[int, int], ...]] = [
    (), ((4, 8),), ((0, 2), (5, 9)), ((10, 12),), ((0, 24),), ((22, 24),), ((3, 4),), ((1, 3), (3, 5), (16, 20)),
]  # fmt: skip

MUTATIONS: list[Change] = [
    *[lambda tokens, w=w: {"window": w} for w in (1, 3, 5, 6, 7, 8, 9, 14, 100)],
    *[lambda tokens, w=w: {"full_window": w} for w in (1, 5, 12, 23, 24, 50)],
    lambda tokens: {"sliding_is_full": True},
    *[lambda tokens, c=c: {"chunk": c} for c in (4, 8, 13, 23, 24, 1000)],
    *[either(lambda b, h, q, k, p=p: k < p) for p in (0, 1, 2, 5, 9)],
    either(lambda b, h, q, k: torch.tensor(True)),
    either(lambda b, h, q, k: torch.tensor(False)),
    *[every(block_sequence_ids=block_ids(*spans)) for spans in BLOCKS],
    *[every(or_mask_function=lambda tokens, s=spans: hf.blockwise_overlay(block_ids(*s)(tokens))) for spans in BLOCKS[:5]],
    *[either(lambda b, h, q, k, s=spans: (q >= s[0]) & (q < s[1]) & (k >= s[0]) & (k < s[1])) for spans in ((4, 6), (9, 13))],
    both(lambda b, h, q, k: k != 3),
    both(lambda b, h, q, k: q != k),
    both(lambda b, h, q, k: (q - k) % 3 != 2),
    both(lambda b, h, q, k: (q < 20) | (k > 3)),
    both(lambda b, h, q, k: k >= 0),
    both(lambda b, h, q, k: q - k < 1000),
    *[every(and_mask_function=rows_of(lambda tokens, n=n: tokens // n, lambda x, y: x == y)) for n in (6, 12, 15, 100)],
    *[every(and_mask_function=rows_of(lambda tokens, n=n: tokens != n, lambda x, y: y)) for n in (0, 11, 23, 99)],
    *[every(and_mask_function=partial(random_table, seed)) for seed in range(4)],
    *[every(or_mask_function=partial(random_table, seed)) for seed in range(4)],
    *[both(hashed(*numbers)) for numbers in ((1, 5), (3, 7), (2, 11), (5, 97))],
    both(failing),
]  # fmt: skip


def masks(model: Any, embeds: Tensor, positions: Tensor | None, change: dict[str, Any]) -> dict[str, Any]:
    """The masks of a wrapper around a text model."""
    change = dict(change)
    window, full_window, chunk = (
        change.pop("window", WINDOW),
        change.pop("full_window", None),
        change.pop("chunk", None),
    )
    sliding, full = copy.copy(model.config), copy.copy(model.config)
    sliding.sliding_window, full.sliding_window, full.attention_chunk_size = window, full_window, chunk
    make = hf.create_chunked_causal_mask if chunk else hf.create_sliding_window_causal_mask
    make = make if chunk or full_window else hf.create_causal_mask
    make_sliding = (
        hf.create_causal_mask if change.pop("sliding_is_full", False) else hf.create_sliding_window_causal_mask
    )
    arguments = {"inputs_embeds": embeds, "attention_mask": None, "past_key_values": None, "position_ids": positions}
    return {
        "full_attention": make(full, **arguments, **change),
        "sliding_attention": make_sliding(sliding, **arguments, **change),
    }


def wrapped(model: Any, change: dict[str, Any], rows: dict[str, Any]) -> Tensor:
    """Logits of a wrapper."""
    embeds = model.get_input_embeddings()(rows["input_ids"])
    attention_mask = masks(model, embeds, rows["position_ids"], change)
    arguments = {name: rows[name] for name in ("position_ids", "plan") if name in rows}
    return model(inputs_embeds=embeds, attention_mask=attention_mask, use_cache=False, **arguments).logits.detach()


@cache
def model_of(implementation: str) -> Any:
    cp.register()
    return make_model(make_config("qwen2"), implementation)


def eager_logits(lengths: tuple[int, ...], change: dict[str, Any]) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    rows = {"input_ids": whole_batch(lengths)["input_ids"], "position_ids": positions}
    return wrapped(model_of("eager"), change, rows)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lengths", [(24,), (15, 9)])
def test_a_mask_behind_a_wrapper_is_refused_or_right(
    lengths: tuple[int, ...], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(MUTATIONS) >= 60
    model = model_of(cp.IMPLEMENTATION)
    documents = Documents(lengths)
    if ranks > 1:  # no messages: only whether the mask is accepted
        empty = lambda q, k, v, *arguments, **others: torch.zeros(*q.shape[:2], v.shape[-1])  # noqa: E731
        monkeypatch.setattr(attention_module, "context_parallel_attention", empty)
    plain, accepted = eager_logits(lengths, {}), []
    for number, change in enumerate(MUTATIONS):
        try:
            outputs = []
            for rank in range(ranks):
                batch, mesh = whole_batch(lengths), mesh_of(ranks, rank)
                rows, _ = cp.planned_batch(batch, model.config, mesh, "direct", documents=documents)
                outputs.append(wrapped(model, change(rows["plan"].plans.layout.tokens(rank)), rows)[0])
        except ConfigError as error:
            assert str(error).startswith("layer ") and "the model's mask" in str(error), number
            continue
        accepted.append(number)
        wanted = eager_logits(lengths, change(np.arange(sum(lengths))))
        planned = plain if ranks > 1 else outputs[0]
        assert float((planned - wanted).abs().max()) < 1e-4, f"mutation {number} is computed otherwise"
    assert 8 <= len(accepted) < len(MUTATIONS) / 3  # those that change nothing are no errors


@pytest.mark.parametrize("length", [65, 1000, 70000, 1 << 20])
@pytest.mark.parametrize(
    "change",
    [
        lambda b, h, q, k: (k <= q) & (q - k < 49),
        lambda b, h, q, k: (k <= q) & (q - k < 51),
        lambda b, h, q, k: k <= q,
        lambda b, h, q, k: (k <= q) & (q - k < 50) | (k < 2),
        lambda b, h, q, k: (k <= q) & (q - k < 50) & (k != q - 7),
        lambda b, h, q, k: (q - k < 50) & (k - q < 1000),
    ],
)
def test_a_mask_of_long_documents_is_compared(length: int, change: Callable[..., Any]) -> None:
    plan = plan_of(Documents([5, length]), window=(49, 0))
    with pytest.raises(ConfigError, match=r"layer 3: the model's mask .* query at position \d+"):
        check_mask("layer 3", ModelMask(change), plan, plan.plans.of_layer(0))
    right = ModelMask(hf.sliding_window_causal_mask_function(50))
    check_mask("layer 3", right, plan, plan.plans.of_layer(0))
    assert right.accepted == {(plan, id(plan.plans.of_layer(0)))}


def plan_of(documents: Documents, window: tuple[int, int] | None = None, ranks: int = 1) -> Any:
    """What a rank needs, with the plan of one document in place of one of a million tokens."""
    from types import SimpleNamespace

    attention = AttentionConfig(4, 2, 8, window=window)
    layer = SimpleNamespace(attention=attention)
    layout = SimpleNamespace(ranks=ranks)
    plans = SimpleNamespace(documents=documents, layout=layout, of_layer=lambda index: layer)
    return type("Plan", (), {"plans": plans, "rank": 0})()


def test_pairs_of_short_documents_are_all_compared() -> None:
    queries, keys = compared_pairs(5, None)
    assert sorted(zip(queries.tolist(), keys.tolist(), strict=True)) == [(q, k) for q in range(5) for k in range(5)]
    assert len(compared_pairs(0, None)[0]) == 0


def test_each_layer_kind_of_a_call_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_cp.integrations.huggingface import masks as masks_module

    calls = []
    evaluate = masks_module._evaluate
    monkeypatch.setattr(masks_module, "_evaluate", lambda *arguments: (calls.append(1), evaluate(*arguments))[1])
    cp.register()
    model = make_model(make_config("gemma3", num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3), cp.IMPLEMENTATION)  # fmt: skip
    rows, _ = cp.planned_batch(whole_batch((9, 4)), model.config, None, documents=Documents([9, 4]))
    model(**rows)
    assert len(calls) == 2


def image_model(implementation: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = Gemma3Config(
        text_config=make_config("gemma3", sliding_window=8, max_position_embeddings=64).to_dict(), vision_config=vision, mm_tokens_per_image=4,
        image_token_id=60, boi_token_id=58, eoi_token_id=59,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation(implementation)
    return model.train()


@pytest.mark.parametrize("implementation", ["mindspeed_cp", {"text_config": "mindspeed_cp"}])
def test_image_tokens_are_refused_and_served_by_blocks(implementation: Any) -> None:
    cp.register()
    eager, model = image_model("eager"), image_model(implementation)
    ids, kinds = whole_batch((20,))["input_ids"], torch.zeros(1, 20, dtype=torch.int64)
    kinds[:, 4:9] = 1
    wanted = eager(inputs_embeds=eager.get_input_embeddings()(ids), token_type_ids=kinds, use_cache=False).logits
    config, batch = model.config.text_config, {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    text, _ = cp.planned_batch({**batch, "token_type_ids": kinds}, config, None)
    with pytest.raises(
        ConfigError, match=r"layer 0 .* query at position 4 see the key at position 5 .*Documents\(lengths, blocks"
    ):
        model(**text)
    blocks = Documents([20], blocks=[[4, 9]])
    for rows in (batch, {**batch, "token_type_ids": kinds}):  # the plan's blocks alone, and those of the model as well
        out = model(**cp.planned_batch(rows, config, None, documents=blocks)[0]).logits.detach()
        assert float((out - wanted).abs().max()) < 1e-5
    other = kinds.roll(1, 1)
    with pytest.raises(ConfigError, match="the model's mask"):
        model(**cp.planned_batch({**batch, "token_type_ids": other}, config, None, documents=blocks)[0])
    text, _ = cp.planned_batch({**batch, "token_type_ids": kinds * 0}, config, None)
    assert model(**text).logits.isfinite().all()  # a text without pictures


def test_layers_without_a_mask_of_transformers_are_refused() -> None:
    model = model_of(cp.IMPLEMENTATION)
    rows, _ = cp.planned_batch(whole_batch((9, 4)), model.config, None, documents=Documents([9, 4]))
    rows["attention_mask"] = {"full_attention": None, "sliding_attention": None}
    with pytest.raises(ConfigError, match=r"layer 0 .*attention_mask is None, .* cannot be compared"):
        model(**rows)
    llama = make_model(make_config("llama"), cp.IMPLEMENTATION)
    rows, _ = cp.planned_batch(whole_batch((9,)), llama.config, None)
    with pytest.raises(ConfigError, match="attention_mask is a mask that was built for planned attention"):
        llama(**rows, attention_mask=ModelMask(hf.causal_mask_function))


def test_a_mask_is_not_cut() -> None:
    mask = ModelMask(hf.causal_mask_function)
    assert mask[:, :, slice(0, None), :] is mask
    with pytest.raises(ConfigError, match=r"the model wants a part of its mask, .*; valid: all rows, logits_to_keep=0"):
        mask[:, :, -3:, :]


@pytest.mark.parametrize("name", names())
def test_masks_of_all_families_are_accepted_on_any_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cp.register()
    empty = lambda q, k, v, *arguments, **others: torch.zeros(*q.shape[:2], v.shape[-1])  # noqa: E731
    monkeypatch.setattr(attention_module, "context_parallel_attention", empty)
    model = make_model(make_config(name), cp.IMPLEMENTATION)
    packs = [Documents([30, 3, 0, 40])]
    if cp.FAMILIES[model.config.model_type].mask == "causal":
        packs.append(Documents([9, 8, 8], parents=[-1, 0, 0]))
        packs.append(Documents([30, 20], blocks=[[3, 9], [30, 34]]))
    for documents in packs:
        for ranks in (1, 2, 4):
            options = {"latents": "off"} if name == "deepseek_v3" else {}
            for rank in range(ranks):
                where = model.config, mesh_of(ranks, rank), "direct"
                if documents.trees is None:
                    batch = {"input_ids": torch.ones(1, documents.tokens, dtype=torch.int64)}
                    rows, _ = cp.planned_batch(batch, *where, documents=documents, **options)
                else:
                    packed = Documents.from_trajectories([list(range(3, 12)) + [20 + i] * 8 for i in range(2)])
                    assert packed.documents == documents
                    rows, _ = cp.planned_trajectories(packed, *where, **options)
                model(**rows)
