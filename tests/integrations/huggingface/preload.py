"""Imports what models of most tests need, for processes that are forked from one that has imported it."""

from importlib import import_module

from tests.integrations.huggingface.models import MODELS, OWN, make_config

for _name in list(MODELS)[:OWN]:
    _model_type = make_config(_name).model_type.removesuffix("_text")
    import_module(f"transformers.models.{_model_type}.modeling_{_model_type}")
