"""The settings: sections of plain values, rules between them, YAML files with errors that name file and line."""

from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.config.suite import SuiteSettings

__all__ = ["Settings", "SuiteSettings", "load_settings"]
