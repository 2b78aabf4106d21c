"""Print the arguments of the Megatron at hand as JSON: {name: [title of its group, flags]}.

Runs in a process of its own: with MEGATRON_LM, a source tree, at the end of sys.path, so that megatron.core stays the
installed one and the tree adds megatron.training. Exit code 3: this Megatron cannot be imported; the reason is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path


def main() -> int:
    """Print the arguments."""
    warnings.simplefilter("ignore")
    if tree := os.environ.get("MEGATRON_LM"):
        sys.path.append(tree)
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from megatron_on_cpu import training_imports

    with training_imports():
        try:
            from megatron.training.arguments import add_megatron_arguments
        except ImportError as error:
            print(f"megatron.training cannot be imported: {error}")
            return 3
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    groups = {
        action.dest: [group.title, action.option_strings]
        for group in parser._action_groups
        for action in group._group_actions
        if action.dest != "help"
    }
    print(json.dumps(groups))
    return 0


if __name__ == "__main__":
    sys.exit(main())
