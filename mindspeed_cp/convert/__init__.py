"""Launches of Megatron and MindSpeed to settings of this package: flags, and launch scripts, which are recorded."""

from mindspeed_cp.convert.launch import Launch
from mindspeed_cp.convert.translate import Change, Conversion, convert_flags, convert_script

__all__ = ["Change", "Conversion", "Launch", "convert_flags", "convert_script"]
