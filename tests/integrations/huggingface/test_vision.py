"""Vision-language models: pictures among the tokens, over ranks, against the documents one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.distributed as dist
import transformers

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.integrations import huggingface as cp
from tests.integrations.huggingface.models import Step, mesh_of

IMAGE, VIDEO, BEGIN, VOCABULARY = 60, 59, 58, 61
#: Documents: numbers of tokens of text, and in turn of a picture; that of the last document is a video, if there are any.
DOCUMENTS = ((5, 4, 4), (7,), (3, 4, 1, 8, 5), (1, 8, 6))
SHORT = ((2, 4, 2), (1,))  # under ring on 3 ranks the first one has no picture, and some have no row of the second

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GRID = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": 57}
_EYE = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEP = {**_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}

#: model_type -> settings of the text model and of the encoder, and others.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {**_TEXT, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        {"mm_tokens_per_image": 4, "image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": 57},
    ),
    "qwen2_5_vl": ({**_TEXT, "rope_parameters": _GRID}, {**_EYE, "window_size": 8, "fullatt_block_indexes": [1]}, _TOKENS),
    "qwen3_vl": ({**_TEXT, "rope_parameters": {**_GRID, "mrope_interleaved": True}}, _DEEP, _TOKENS),
    "qwen2_vl": (
        {**_TEXT, "rope_parameters": _GRID},
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        _TOKENS,
    ),
    "qwen3_vl_moe": ({**_TEXT, **_EXPERTS, "rope_parameters": {**_GRID, "mrope_interleaved": True}}, _DEEP, _TOKENS),
}  # fmt: skip


def make_model(name: str, attention: dict[str, str]) -> Any:
    """Random model with the same weights under any attention implementation."""
    text, vision, others = MODELS[name]
    config = transformers.AutoConfig.for_model(name, text_config=dict(text), vision_config=dict(vision), **others)
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def samples_of(name: str, documents: tuple[tuple[int, ...], ...]) -> list[dict[str, torch.Tensor]]:
    """What a processor makes of each document, with labels; tokens of images are not learned."""
    generator, samples = torch.Generator().manual_seed(7), []
    is_gemma = name == "gemma3"
    for number, parts in enumerate(documents):
        ids, kinds, pictures, grids = [], [], [], []
        is_video = number == 3 and not is_gemma
        token, kind = (VIDEO, 2) if is_video else (IMAGE, 1)
        for i, count in enumerate(parts):
            text = torch.randint(3, 57, (count,), generator=generator)
            ids.append(text if i % 2 == 0 else torch.full((count,), token))
            kinds.append(torch.full((count,), i % 2 * kind))
            if i % 2 and is_gemma:  # of four tokens each; two that touch are one block
                pictures.append(torch.randn(count // 4, 3, 16, 16, generator=generator))
            elif i % 2:
                pictures.append(torch.randn(4 * count, 96, generator=generator))
                grids.append([1, 4, count])
        tokens, of_token = torch.cat(ids)[None], torch.cat(kinds)[None]
        labels = tokens.masked_fill(of_token > 0, -100)
        sample = {
            "input_ids": tokens,
            "labels": labels,
            "token_type_ids" if is_gemma else "mm_token_type_ids": of_token,
        }
        if pictures:
            sample["pixel_values_videos" if is_video else "pixel_values"] = torch.cat(pictures)
        if grids:
            sample["video_grid_thw" if is_video else "image_grid_thw"] = torch.tensor(grids)
        samples.append(sample)
    return samples


def padded_batch(name: str, model: Any, documents: tuple[tuple[int, ...], ...] = DOCUMENTS) -> dict[str, torch.Tensor]:
    """The documents as rows with padding, as a processor makes them of several texts."""
    samples, batch = samples_of(name, documents), {}
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    for key in samples[0]:
        if samples[0][key].shape == samples[0]["input_ids"].shape:
            rows = [torch.nn.functional.pad(sample[key], (0, longest - sample[key].shape[1])) for sample in samples]
            batch[key] = torch.cat(rows)
    lengths = torch.tensor([sample["input_ids"].shape[1] for sample in samples])
    batch["attention_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        if any(key in sample for sample in samples):
            batch[key] = torch.cat([sample[key] for sample in samples if key in sample])
    if name != "gemma3":
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
        batch["position_ids"] = model.model.get_rope_index(**{key: batch.get(key) for key in names})[0]
    return batch


@cache
def reference_step(name: str, documents: tuple[tuple[int, ...], ...] = DOCUMENTS) -> Step:
    """The documents one by one through the model as transformers computes it."""
    model = make_model(name, {"text_config": "eager", "vision_config": "eager"})
    total, count = torch.zeros(()), 0
    for sample in samples_of(name, documents):
        targets = sample.pop("labels")[0, 1:]
        logits = model(**sample, use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    (total / count).backward()
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    return Step(float(total.detach()) / count, gradients)


def planned_step(
    rank: int, group: Any, name: str, algorithm: str, documents: Any = DOCUMENTS, is_sharded: bool = False
) -> Step:
    """One rank's step; gradients are summed over the group, or averaged by FSDP2, with recomputed layers."""
    model = make_model(name, {"text_config": cp.register(), "vision_config": "sdpa"})
    ranks = 1 if group is None else group.size()
    batch = padded_batch(name, model, documents)
    if is_sharded:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    rows, labels = cp.planned_batch(batch, model.config, mesh_of(ranks, rank, group), algorithm)
    share = cp.loss(model(**rows).logits, labels, cp.count_labels(labels, group), group)
    share.backward()
    if is_sharded:
        whole = {key: x.grad.full_tensor() for key, x in model.named_parameters() if x.grad is not None}
        return Step(cp.global_loss(share, group), whole)
    gradients = {key: x.grad / ranks for key, x in model.named_parameters() if x.grad is not None}
    if ranks > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return Step(cp.global_loss(share, group), gradients)


CASES = [
    pytest.param(name, algorithm, ranks, marks=() if (name, algorithm, ranks) in DEFAULT else pytest.mark.thorough)
    for DEFAULT in [(("gemma3", "direct", 2), ("qwen2_5_vl", "hierarchical", 2), ("qwen3_vl", "direct", 3), ("gemma3", "ring", 1))]
    for name in MODELS
    for algorithm in ("ring", "direct", "hierarchical")
    for ranks in (1, 2, 3)
]  # fmt: skip


@pytest.mark.parametrize(("name", "algorithm", "ranks"), CASES)
def test_documents_with_pictures_equal_one_by_one(pool, name: str, algorithm: str, ranks: int) -> None:
    wanted = reference_step(name)
    assert any("vis" in key and float(x.abs().max()) > 1e-4 for key, x in wanted.gradients.items())
    for step in pool.run(ranks, planned_step, name, algorithm):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_fsdp_and_recomputed_layers_change_nothing(pool, name: str) -> None:
    wanted = reference_step(name)
    for step in pool.run(2, planned_step, name, "direct", DOCUMENTS, True):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


def test_a_rank_without_pictures_takes_part_in_their_encoder(pool) -> None:
    model = make_model("qwen3_vl", {"text_config": cp.register(), "vision_config": "sdpa"})
    batch, counts = padded_batch("qwen3_vl", model, SHORT), []
    for rank in range(3):
        rows, _ = cp.planned_batch(batch, model.config, mesh_of(3, rank), "ring")
        counts.append(len(rows["plan"].features["image"][0]))
    assert min(counts) == 0 and sum(counts) == 4
    wanted = reference_step("qwen3_vl", SHORT)
    assert all(step.largest_error(wanted) < 1e-5 for step in pool.run(3, planned_step, "qwen3_vl", "ring", SHORT))


def test_batches_whose_pictures_do_not_fit_are_refused() -> None:
    model = make_model("qwen2_5_vl", {"text_config": cp.register(), "vision_config": "sdpa"})
    batch = padded_batch("qwen2_5_vl", model)
    for changes, says in (
        ({"position_ids": None}, r"pixel_values and no position_ids \[3, rows, tokens\]; valid: .*get_rope_index"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(4, 21, 32)}, "pixel_values and no input_ids"),
    ):
        with pytest.raises(ConfigError, match=says):
            cp.planned_batch({**batch, **changes}, model.config, None)
    half = {**batch, "pixel_values": batch["pixel_values"][:16], "image_grid_thw": batch["image_grid_thw"][:1]}
    with pytest.raises(ConfigError, match=r"the images of the batch have 4 features, but input_ids have 16 tokens"):
        model(**cp.planned_batch(half, model.config, None)[0])
    assert "get_image_features" not in vars(model.model)
    with pytest.raises(
        ConfigError, match=r"model_type is 'qwen2_5_vl': its pictures have a place in planned_batch alone"
    ):
        cp.PlannedCollator(model.config, None)
    everywhere = make_model("qwen2_5_vl", cp.register())
    with pytest.raises(ConfigError, match=r"vision_config has the attention .*'vision_config': 'sdpa'"):
        cp.planned_batch(batch, everywhere.config, None)


def test_pictures_that_touch_in_neighbouring_documents_are_two_blocks() -> None:
    from mindspeed_cp.integrations.huggingface.vision import picture_blocks

    kept = torch.ones(1, 9, dtype=torch.bool).numpy()
    kinds = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 1]])
    documents = picture_blocks(kinds, kept, Documents([3, 0, 6]))
    assert documents == Documents([3, 0, 6], blocks=[[1, 3], [3, 4], [5, 7], [8, 9]])
    assert picture_blocks(kinds * 0, kept, Documents([3, 0, 6])) == Documents([3, 0, 6])
    with pytest.raises(ConfigError, match="a picture has 3 tokens behind each other, but sliding_window is 2"):
        picture_blocks(kinds, kept, Documents([9]), window=2)
