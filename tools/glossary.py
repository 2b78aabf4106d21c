"""The text of docs/glossary.md, from the docstrings of the nouns; `make docs-tables` writes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: word -> (file, source). The source is the name of a class or of a constant with a `#:` comment, "" for the docstring
#: of the module, or the first words of one of its sentences.
NOUNS = {
    "documents": ("mindspeed_cp/layout/documents.py", "Documents"),
    "topology": ("mindspeed_cp/plan/problem.py", "Topology"),
    "plan": ("mindspeed_cp/plan/program.py", "Plan"),
    "program": ("mindspeed_cp/plan/program.py", "Program"),
    "step": ("mindspeed_cp/plan/program.py", "A step is"),
    "slot": ("mindspeed_cp/plan/program.py", "A slot is"),
    "slot content": ("mindspeed_cp/plan/records.py", "CONTENT"),
    "message": ("mindspeed_cp/plan/records.py", "Messages"),
    "tile": ("mindspeed_cp/plan/records.py", "TILE"),
    "part": ("mindspeed_cp/plan/parts.py", "A part is"),
    "layout": ("mindspeed_cp/layout/layout.py", "Layout"),
    "token span": ("mindspeed_cp/layout/layout.py", "TokenSpan"),
    "redistribution": ("mindspeed_cp/layout/redistribution.py", "Redistribution"),
    "linear layout": ("mindspeed_cp/algorithms/linear_layout.py", ""),
    "KV fetch": ("mindspeed_cp/algorithms/kv_fetch/__init__.py", ""),
    "round": ("mindspeed_cp/algorithms/kv_fetch/programs.py", "A round is"),
    "stage": ("mindspeed_cp/algorithms/kv_fetch/programs.py", "A stage is"),
    "placement": ("mindspeed_cp/algorithms/placement/__init__.py", ""),
    "lowering": ("ops/attention/lowering/__init__.py", ""),
}

HEAD = """\
# Glossary

One word for one thing, in code, documentation, errors and reports. Where the field has a word, it is used. Names that
were replaced are in [tests/retired_words.tsv](../tests/retired_words.tsv); a test keeps them out.

## Words of the field
| word | meaning |
|---|---|
| document | one training sample inside a packed row; attention stays inside it |
| packed row, micro-batch, global batch | documents back to back; the rows of one forward; those of one optimizer step |
| context-parallel (CP) group, rank, node | as in Megatron; ranks are numbered node by node |
| DP replica | a copy of the model's parallel ranks that gets other data |
| cu_seqlens, TND (thd), sbhd | the packed and padded layouts of FlashAttention and Megatron |
| lse | log-sum-exp of the scores, fp32 |
| zig-zag, ring, double ring, Ulysses, hybrid (USP), all-gather, halo | as in the papers |
| send, receive, P2P operation, collective, stream, communicator | as in HCCL and NCCL |
| exposed and hidden communication, imbalance, lower bound, MFU | as in papers on performance |
| prefix tree, sink, window, block-bidirectional mask | as in the papers on these |

## Words of this project
This table is generated from docstrings by `make docs-tables`.

| word | meaning | file |
|---|---|---|
"""


def page() -> str:
    """Return the text of docs/glossary.md."""
    lines = [f"| {word} | {definition(word, file, source)} | `{file}` |\n" for word, (file, source) in NOUNS.items()]
    return HEAD + "".join(lines)


def definition(word: str, file: str, source: str) -> str:
    """Return the first sentence of the docstring or comment of a noun, without the noun, in one line."""
    text = (ROOT / file).read_text("utf-8")
    module = ast.parse(text)
    classes = {node.name: ast.get_docstring(node) or "" for node in module.body if isinstance(node, ast.ClassDef)}
    comments = re.findall(r"((?:^#:.*\n)+)^(\w+) = ", text, re.MULTILINE)
    constants = {name: re.sub(r"^#: ?", "", comment, flags=re.MULTILINE) for comment, name in comments}
    sources = classes | constants | {"": ast.get_docstring(module) or ""}
    source_text = sources[source] if source in sources else _from(sources[""], source)
    sentence = re.split(r"(?<=[.:]) +(?=[A-Z*])|::", " ".join(source_text.split("\n\n")[0].split()))[0].rstrip(".:")
    if not sentence:
        raise ValueError(f"{file} does not define {source!r}: correct NOUNS in tools/glossary.py")
    sentence = re.sub(rf"^(?:An? )?{word}s?(?: is|:) ", "", sentence, flags=re.IGNORECASE)
    return (sentence[0].upper() + sentence[1:]).replace("|", "\\|")


def _from(text: str, first_words: str) -> str:
    """Return the text from a sentence on, or an empty string."""
    joined = " ".join(text.split())
    return joined[joined.index(first_words) :] if first_words in joined else ""
