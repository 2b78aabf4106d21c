"""Launch scripts read without running them: their commands, with what their variables hold."""

from mindspeed_cp.convert.shell.evaluate import ScriptCommand, read_script
from mindspeed_cp.convert.shell.words import Piece, Unknown

__all__ = ["Piece", "ScriptCommand", "Unknown", "read_script"]
