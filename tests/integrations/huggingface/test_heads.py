"""Heads that pool: refused over a rank's own rows, and right over rows that are gathered."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GenericForSequenceClassification

from mindspeed_cp import ConfigError, Documents
from mindspeed_cp.integrations import huggingface as cp
from mindspeed_cp.integrations.ms_swift import use_plans
from mindspeed_cp.integrations.verl import planned_engine
from tests.integrations.huggingface.models import VOCABULARY, Step, make_config, mesh_of, names, whole_batch
from tests.integrations.peers.swift_double import SequenceParallel
from tests.integrations.peers.verl_double import Engine

LENGTHS = (9, 5, 13)
CLASSES = 3
BY_ROW = ("CausalLM", "MaskedLM", "TokenClassification", "LMHeadModel")


def heads_of(name: str) -> list[type]:
    """Classes of a family that have a head."""
    module = import_module(type(make_config(name)).__module__.replace("configuration", "modeling"))
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    return [
        kind
        for kind in kinds
        if issubclass(kind, transformers.PreTrainedModel) and ("For" in kind.__name__ or "Heads" in kind.__name__)
    ]


def rows_for(config: Any, batch: dict[str, torch.Tensor] | None = None, rank: int = 0, group: Any = None) -> dict[str, Any]:  # fmt: skip
    mesh, batch = (
        mesh_of(group.size() if group else 1, rank, group),
        batch or {"input_ids": whole_batch(LENGTHS)["input_ids"]},
    )
    return cp.planned_batch(batch, config, mesh, "ring", documents=Documents(LENGTHS))[0]


@pytest.mark.parametrize("name", names())
def test_a_head_that_pools_is_refused_and_one_that_reads_rows_runs(name: str) -> None:
    cp.register()
    config = make_config(name, num_labels=CLASSES)
    heads = [
        kind
        for kind in heads_of(name)
        if name not in ("gemma3", "gemma4") or "Text" in kind.__name__ or "CausalLM" in kind.__name__
    ]
    has_classifier = type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    assert any("SequenceClassification" in kind.__name__ for kind in heads) == has_classifier
    for kind in heads:
        model = kind._from_config(config, attn_implementation=cp.IMPLEMENTATION)
        if kind.__name__.endswith(BY_ROW):
            assert model(**rows_for(config)).logits.shape[:2] == (1, sum(LENGTHS))
            continue
        if kind.forward is GenericForSequenceClassification.forward:
            assert model(**rows_for(config)).logits.shape == (len(LENGTHS), CLASSES)
            continue
        with pytest.raises(ConfigError, match=rf"the model is a {kind.__name__}, whose head .*gather_rows"):
            model(**rows_for(config))


def test_values_that_are_not_of_rows_are_refused() -> None:
    cp.register()

    class Pooling(transformers.LlamaForCausalLM):
        """A class of a user's own, whose name says nothing."""

        def forward(self, *arguments: Any, **others: Any) -> dict[str, torch.Tensor]:
            return {"reward": super().forward(*arguments, **others).logits.mean((1, 2))}

    class Rewards(transformers.LlamaForSequenceClassification):
        """One of a class that pools, in its own way."""

        def forward(self, *arguments: Any, **others: Any) -> Any:
            return super().forward(*arguments, **others)

    config = make_config("llama", num_labels=CLASSES)
    rows = rows_for(config)
    with pytest.raises(
        ConfigError, match=r"Pooling returned reward of shape \[1\], which are no values of the 27 rows"
    ):
        Pooling._from_config(config, attn_implementation=cp.IMPLEMENTATION)(**rows)
    with pytest.raises(ConfigError, match="the model is a LlamaForSequenceClassification"):
        Rewards._from_config(config, attn_implementation=cp.IMPLEMENTATION)(**rows)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=cp.IMPLEMENTATION)
    with pytest.raises(ConfigError, match="logits_to_keep is 1, the last of the rows of rank 0"):
        model(**rows, logits_to_keep=1)
    assert model(**rows, logits_to_keep=torch.tensor([3, 8])).logits.shape == (1, 2, VOCABULARY)
    bert = make_config("bert")
    with pytest.raises(ConfigError, match=r"BertModel returned pooler_output of .*add_pooling_layer=False"):
        transformers.BertModel._from_config(bert, attn_implementation=cp.IMPLEMENTATION)(**rows_for(bert))
    encoder = transformers.BertModel._from_config(bert, attn_implementation=cp.IMPLEMENTATION, add_pooling_layer=False)
    assert encoder(**rows_for(bert)).last_hidden_state.shape == (1, 27, 32)


def test_other_implementations_pool_as_before() -> None:
    cp.register()
    model = transformers.LlamaForSequenceClassification._from_config(make_config("llama"), attn_implementation="sdpa")
    assert model(whole_batch((5,))["input_ids"]).logits.shape == (1, 2)


def test_labels_of_tokens_are_not_those_of_the_next_token() -> None:
    cp.register()
    batch, classes = whole_batch(LENGTHS), torch.randint(0, CLASSES, (1, 27))
    config = make_config("llama", num_labels=CLASSES)
    model = transformers.LlamaForTokenClassification._from_config(config, attn_implementation=cp.IMPLEMENTATION).eval()
    for rows in (rows_for(config, batch), {**rows_for(config), "labels": classes}):
        with pytest.raises(ConfigError, match=r'shifted by one token; .*under another name in the batch, such as "c'):
            model(**rows)
    other = make_config("llama", num_labels=CLASSES)
    plain = transformers.LlamaForTokenClassification._from_config(other, attn_implementation="sdpa").eval()
    plain.load_state_dict(model.state_dict())
    rows = rows_for(config, {"input_ids": batch["input_ids"], "classes": classes})
    own = rows.pop("classes")
    wanted = torch.cat([plain(ids).logits for ids in batch["input_ids"].split(LENGTHS, 1)], 1)
    assert float((model(**rows).logits - wanted).abs().max()) < 1e-5
    share = cp.loss(model(**rows).logits, own, cp.count_labels(own))
    assert float(share) == pytest.approx(float(torch.nn.functional.cross_entropy(wanted[0], classes[0])), abs=1e-5)


def classifier_step(rank: int, group: Any, name: str, labels: int, is_sharded: bool = False) -> Step:
    """A step of a classifier or reward model as its class computes it; without a group document by document."""
    import torch.nn.functional as F

    cp.register()
    config = make_config(name, num_labels=labels, pad_token_id=None)
    kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    torch.manual_seed(4)
    model = kind._from_config(config, attn_implementation="eager" if group is None else cp.IMPLEMENTATION).train()
    ids, classes = whole_batch(LENGTHS)["input_ids"], torch.tensor([2, 0, 1])
    if group is None:
        logits = torch.cat([model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)])
    else:
        if is_sharded:
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        logits = model(**rows_for(config, {"input_ids": ids}, rank, group)).logits
    loss = F.cross_entropy(logits, classes) if labels > 1 else -F.logsigmoid(logits[0] - logits[1:]).mean()
    loss.backward()
    gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    if is_sharded:
        gradients = {key: x.full_tensor() for key, x in gradients.items()}
    elif group is not None:
        for gradient in gradients.values():  # as DDP and FSDP average
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()
    return Step(float(loss.detach()), gradients)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("name", "labels"), [("llama", CLASSES), ("qwen2", 1), ("gpt_oss", CLASSES)])
def test_a_classifier_equals_its_documents_one_by_one(pool, name: str, labels: int, ranks: int) -> None:
    wanted = classifier_step(0, None, name, labels)
    for step in pool.run(ranks, classifier_step, name, labels):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


def test_a_classifier_under_fsdp_equals_its_documents_one_by_one(pool) -> None:
    wanted = classifier_step(0, None, "llama", CLASSES)
    for step in pool.run(2, classifier_step, "llama", CLASSES, True):
        assert step.gradients.keys() == wanted.gradients.keys() and step.largest_error(wanted) < 1e-5


def test_classes_go_to_a_loss_of_documents() -> None:
    cp.register()
    config = make_config("llama", num_labels=CLASSES)
    model = transformers.LlamaForSequenceClassification._from_config(config, attn_implementation=cp.IMPLEMENTATION)
    with pytest.raises(ConfigError, match=r"labels were given to a LlamaForSequenceClassification; valid: none"):
        model(**rows_for(config), labels=torch.tensor([2, 0, 1]))
    assert "forward" not in vars(model)


def pooled_scores(model: Any, hidden: torch.Tensor, kind: str) -> torch.Tensor:
    return model.score(hidden[:, -1] if kind == "last" else hidden.mean(1))


def pooled_step(rank: int, group: Any, kind: str, average: bool) -> Step:
    """A step of a classifier of documents whose rows are on all ranks."""
    cp.register()
    torch.manual_seed(4)
    config = make_config("llama", num_labels=CLASSES)
    ranks = 1 if group is None else group.size()
    model = transformers.LlamaForSequenceClassification._from_config(
        config, attn_implementation="sdpa" if group is None else cp.IMPLEMENTATION
    )
    batch, classes = whole_batch(LENGTHS), torch.tensor([2, 0, 1])
    if group is None:
        hidden = [model.model(ids, use_cache=False).last_hidden_state for ids in batch["input_ids"].split(LENGTHS, 1)]
    else:
        rows = rows_for(config, {"input_ids": batch["input_ids"]}, rank, group)
        x, factor = model.model(**rows).last_hidden_state, float(ranks) if average else 1.0
        ends = rows["plan"].plans.documents.offsets[1:] - 1
        if kind == "last":
            hidden = list(cp.gather_rows(x, rows["plan"], gradient_factor=factor, tokens=ends).split(1, 1))
        else:
            hidden = list(cp.gather_rows(x, rows["plan"], gradient_factor=factor).split(LENGTHS, 1))
    loss = torch.nn.functional.cross_entropy(torch.cat([pooled_scores(model, x, kind) for x in hidden]), classes)
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    if group is not None:
        for name, gradient in gradients.items():
            if average or name != "score.weight":  # without the average each rank has the whole gradient of the head
                dist.all_reduce(gradient, group=group)
            if average:
                gradient /= ranks
    return Step(float(loss.detach()), gradients)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_head_on_gathered_rows_equals_the_documents_one_by_one(pool, kind: str, average: bool) -> None:
    wanted = pooled_step(0, None, kind, average)
    for step in pool.run(3, pooled_step, kind, average):
        assert step.gradients.keys() == wanted.gradients.keys()
        assert step.largest_error(wanted) < 1e-5


def test_tokens_that_are_not_in_the_batch_are_not_gathered() -> None:
    plan = rows_for(make_config("llama"))["plan"]
    hidden = torch.arange(27.0)[None]
    assert cp.gather_rows(hidden, plan, tokens=torch.tensor([26, 0, 0])).tolist() == [[26, 0, 0]]
    for tokens, says in (
        ([27], "tokens has 27; valid: 0 to 26"),
        ([-1], "tokens has -1"),
        ([0.5], "tokens is float64"),
    ):
        with pytest.raises(ConfigError, match=says):
            cp.gather_rows(hidden, plan, tokens=tokens)
    with pytest.raises(ConfigError, match=r"the tensor has shape \[1, 26\]; valid: 27 rows in dimension 1"):
        cp.gather_rows(hidden[:, 1:], plan)


def test_values_of_documents_are_no_part_of_a_batch() -> None:
    for name in ("labels", "rewards"):
        batch = {**whole_batch(LENGTHS), name: torch.tensor([1])}
        with pytest.raises(ConfigError, match=rf"the batch's {name} is of shape \[1\].*pooled rows of gather_rows"):
            rows_for(make_config("llama"), batch)


def test_trainers_that_slice_rows_refuse_heads_that_pool() -> None:
    model = transformers.LlamaForSequenceClassification._from_config(make_config("llama"), attn_implementation="sdpa")
    with pytest.raises(ConfigError, match="the model is a LlamaForSequenceClassification"):
        planned_engine(type("Pooled", (Engine,), {"_build_module": lambda self: model}))(None, {"sp": mesh_of(2)})
    instance = SequenceParallel()
    use_plans(instance)
    with pytest.raises(ConfigError, match="the model is a LlamaForSequenceClassification"):
        instance.prepare(2, model, None, padding_free=True)


def test_a_class_from_outside_is_known_by_its_base_and_not_by_its_name() -> None:
    from mindspeed_cp.integrations.huggingface.heads import check_model

    config = make_config("llama")
    check_model(type("LlamaForDistillation", (transformers.LlamaForCausalLM,), {})(config))
    for base, name in (
        (transformers.LlamaForSequenceClassification, "LlamaForRanking"),
        (transformers.LlamaPreTrainedModel, "MineForSequenceClassification"),
    ):
        with pytest.raises(ConfigError, match="reads other rows than its own"):
            check_model(type(name, (base,), {})(config))
