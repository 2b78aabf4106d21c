"""Heads that read other rows than their own: a rank has only its own rows.

A rank's last row is not the last token of a document, and a mean over its rows is not that of a document. Calls of
models with a plan are checked: the class says what it reads, and so does the shape of what it returns. The classifiers
that transformers makes alike for all decoders get the last token of every document, from the rank that has it; others
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any

from torch import Tensor, nn

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.integrations.huggingface.families import family_of
from mindspeed_cp.integrations.huggingface.plans import RankPlans
from mindspeed_cp.integrations.huggingface.rows import gather_rows
from mindspeed_cp.integrations.huggingface.vision import own_features

#: Ends of the names of transformers' classes whose heads read each row alone, behind "For".
_BY_ROW = ("CausalLM", "MaskedLM", "ConditionalGeneration", "TokenClassification")

#: Tasks of transformers' heads that pool, by which classes from outside are known, too.
_POOLING = ("SequenceClassification", "MultipleChoice", "QuestionAnswering", "NextSentencePrediction")

_VALID = (
    "heads that read each row alone (...ForCausalLM, ...ForMaskedLM, ...ForConditionalGeneration, "
    "...ForTokenClassification), a decoder's ...ForSequenceClassification with transformers' own forward under "
    "planned_batch, or the hidden states of the model below, put together by gather_rows(hidden, "
    'rows["plan"], tokens=...), and the head on these'
)


def check_model(model: Any) -> None:
    """Raise ConfigError if plans do not serve the family of a model of transformers, or the model, or one in it, has a
    head that reads other rows than its own."""
    family_of(model.config)
    for module in model.modules():
        _check_class(type(module))


def check_calls(base: type[nn.Module]) -> None:
    """Let models check their heads when they are called with a plan; done once.

    Args:
        base: class of all models of transformers.
    """
    if "__call__" in vars(base):
        return

    def call(self: Any, *arguments: Any, **others: Any) -> Any:
        plan = others.get("plan")
        if not isinstance(plan, RankPlans):
            return nn.Module.__call__(self, *arguments, **others)
        if _pools_last_tokens(type(self)) and plan.plans.documents.trees is None:
            return _call_classifier(self, arguments, others)
        _check_call(self, plan, others)
        with own_features(self, plan) if plan.features else nullcontext():
            output = nn.Module.__call__(self, *arguments, **others)
        _check_output(type(self).__name__, output, plan, others.get("logits_to_keep") is not None)
        return output

    base.__call__ = call  # type: ignore[method-assign]


def _pools_last_tokens(kind: type) -> bool:
    """Return True if a class is a classifier with the forward that transformers gives all its decoders."""
    generic = [base for base in kind.__mro__ if base.__name__ == "GenericForSequenceClassification"]
    return bool(generic) and getattr(kind, "forward", None) is vars(generic[0]).get("forward")


def _call_classifier(model: Any, arguments: tuple[Any, ...], others: dict[str, Any]) -> Any:
    """Call a classifier; its logits [documents, labels] are the scores of the last tokens of all documents that have
    tokens, on every rank, and gradients are those for an average over the ranks, as DDP and FSDP take it."""
    if others.get("labels") is not None:
        raise ConfigError(
            f"labels were given to a {type(model).__name__}; valid: none, and a loss of the logits [documents, labels] "
            "and the classes of all documents, the same on all ranks of the group"
        )

    def forward(self: Any, *arguments: Any, plan: RankPlans, **others: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        hidden = getattr(self, self.base_model_prefix)(*arguments, plan=plan, **others)[0]
        documents, ranks = plan.plans.documents, plan.plans.layout.ranks
        ends = documents.offsets[1:][documents.lengths > 0] - 1
        logits = gather_rows(self.score(hidden), plan, gradient_factor=float(ranks), tokens=ends)
        return SequenceClassifierOutputWithPast(logits=logits[0])

    model.forward = MethodType(forward, model)
    try:
        return nn.Module.__call__(model, *arguments, **others)
    finally:
        del model.forward


def _check_class(kind: type) -> None:
    """Raise ConfigError if a class or a base of it has a head that reads other rows."""
    for base in kind.__mro__:
        name = base.__name__
        task = name.rpartition("For")[2] if "For" in name else ""
        pools = task in _POOLING  # of a class from outside, whose name may say anything else
        if base.__module__.startswith("transformers."):
            pools = name.endswith("DoubleHeadsModel") or (task[:1].isupper() and task not in _BY_ROW)
        if pools:
            raise ConfigError(
                f"the model is a {name}, whose head reads other rows than its own; a rank has only its own rows; "
                f"valid: {_VALID}"
            )


def _check_call(model: Any, plan: RankPlans, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if a call of a model reads other rows, or labels that are not those of its rows."""
    _check_class(type(model))
    kept = arguments.get("logits_to_keep")
    if isinstance(kept, int) and kept:
        raise ConfigError(
            f"logits_to_keep is {kept}, the last of the rows of rank {plan.rank}, which end no document; valid: 0, or "
            "a tensor of rows of this rank"
        )
    kind = type(model).__name__
    if kind.endswith("ForTokenClassification") and (plan.shifts_labels or arguments.get("labels") is not None):
        raise ConfigError(
            f"labels were given to a {kind}, whose own loss is the mean over the rows of rank {plan.rank}, or were in "
            "the batch, where those of a causal model are shifted by one token; valid: classes of tokens under another "
            'name in the batch, such as "classes", and loss(model(**rows).logits, classes, count_labels(classes))'
        )


def _check_output(model: str, output: Any, plan: RankPlans, keeps_rows: bool) -> None:
    """Raise ConfigError if a model returned something else than scalars and values of rows, or of chosen rows."""
    listed = output if isinstance(output, tuple) else (output,)
    for name, x in output.items() if isinstance(output, Mapping) else enumerate(listed):
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or name == "image_hidden_states":
            continue
        is_by_row = tuple(x.shape[:2]) == (1, plan.padded_rows) and name != "pooler_output"
        is_of_chosen_rows = x.dim() == 3 and (name == "logits" or (keeps_rows and isinstance(name, int)))
        if not is_by_row and not is_of_chosen_rows:
            raise ConfigError(
                f"{model} returned {name} of shape {list(x.shape)}, which are no values of the {plan.padded_rows} rows "
                f"of rank {plan.rank}: a pooled value knows only these; valid: models without a pooler "
                f"(add_pooling_layer=False) and {_VALID}"
            )
