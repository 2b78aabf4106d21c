"""Random programs of branches, loops and functions: what is read as known is what bash has, whenever it gets there."""

from __future__ import annotations

import random
import subprocess
from itertools import count
from pathlib import Path

import pytest

from mindspeed_cp.convert.shell import read_script
from mindspeed_cp.convert.shell.words import Field, field_text
from tests.convert.bash import BASH, needs_bash
from tests.limits import HANG

COMMANDS = (
    *("A=1", "A=2", 'A="$A x"', "A+=' y'", "B=$A", 'B="$B$A"', "A=${A}x", 'A="y $A"', "A=$1", 'A="$A" B="$A"'),
    *("A=${B:-9}", ": ${B:=3}", "B=${A:+w}", "B=$((B+1))", "A=$(echo 9)", "unset A", "export A=8", 'export "B=k"'),
    *("let B=3", "((A=4))", "((A+=1)) && B=2", ": $((B=5))", "printf -v A 6", "read -r A <<< z", "declare A=7"),
    *('eval "B=7"', 'C=A; eval "$C=5"', "eval 'A=4; B=$A'", "source ./file.sh", "read A B < file.sh"),
    *("D=(1 2); D+=($A); B=${D[2]}", "D+=(z)", 'D=("${D[@]}" $A)', 'B="${D[*]}"', "B=${D[0]}", "unset D", "A=(1 2)"),
    *("shift", "shift 2", 'eval "shift"', "set -- p q", "set -e; set +e", "true && A=3", "false || B=4"),
    *('[ -n "$A" ] && B=2', 'test -n "$A" || A=1 B=2'),
)
#: Calls, by the function around them: none calls itself.
CALLS = {"": ("f", "g", "f 1 2", "g $A", 'eval "f"'), "g": ("f", "f 1 2", 'eval "f $1"'), "f": ()}
LOCAL = ("local A=5", "local B", "declare -x B=6")
BLOCKS = (
    'for i in 1 2; do\n{}\n[ "$A" = 1 ] && break\n{}\ndone',
    *("for i in 1 2; do\n{}\ndone", "for ((j=0; j<2; j++)); do\n{}\ndone", "K=0; while ((K++ < 2)); do\n{}\ndone"),
    *("K=0; until {}; ((++K > 2)); do\n{}\ndone", "true | while true; do\n{}\nbreak; done"),
    *('if [ "$A" = 1 ]; then\n{}\nfi', 'if [ "$B" = 3 ]; then\n{}\nelif true; then\n{}\nelse\n{}\nfi'),
    *('case "$A" in 1)\n{}\n;;\n*)\n{}\n;; esac', "{{\n{}\n}}", "(\n{}\n)"),
)
FUNCTIONS = {"f() {{\n{}\n}}": "f", "g() {{\n{}\n}}": "g", "function f {{\n{}\n}}": "f"}

_PRELUDE = 'record() { printf "%s|" "$@" >> log; echo >> log; }\n'


class Program:
    """A random program, of which every `record` has a number."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), count()
        self.text = f"A=0\nB=0\n{self.block(3, '')}\n{self.record()}\n"

    def record(self) -> str:
        return f'record {next(self.numbers)} ".$A" ".$B" ".$1"'

    def block(self, depth: int, function: str) -> str:
        return "\n".join(self.statement(depth, function) for _ in range(self.random.randint(1, 4)))

    def statement(self, depth: int, function: str) -> str:
        kind = self.random.random()
        if kind < 0.35:
            return self.record()
        if kind < 0.75 or depth == 0:
            return self.random.choice(COMMANDS + CALLS[function] + (LOCAL if function else ()))
        form = self.random.choice((*BLOCKS, *FUNCTIONS))
        inside = FUNCTIONS.get(form, function)
        return form.format(*(self.block(depth - 1, inside) for _ in range(form.count("{}"))))


def logged(text: str, folder: Path) -> dict[str, set[tuple[str, ...]]]:
    """Run a program; return the words of each `record`, whenever it ran."""
    log = folder / "log"
    log.write_text("")
    (folder / "program.sh").write_text(_PRELUDE + text)
    assert BASH is not None
    subprocess.run([BASH, "program.sh", "d"], cwd=folder, capture_output=True, check=False, timeout=HANG)
    words: dict[str, set[tuple[str, ...]]] = {}
    for line in log.read_text().splitlines():
        number, *values = line.split("|")[:-1]
        words.setdefault(number, set()).add(tuple(values))
    return words


def is_known(field: Field) -> bool:
    return not any(piece.unknown or piece.before_file for piece in field)


@needs_bash
@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 3000), marks=pytest.mark.thorough)])
def test_what_is_known_is_what_bash_has(seeds: range, tmp_path: Path) -> None:
    (tmp_path / "file.sh").write_text("A=q\n")
    known = total = 0
    for seed in seeds:
        text = Program(seed).text
        words = logged(text, tmp_path)
        for command in read_script(text, "program", {"1": "d"}):
            if field_text(command.fields[0]) != "record":
                continue
            number, *fields = command.fields[1:]
            for place, field in enumerate(fields):
                total += 1
                if is_known(field):
                    known += 1
                    values = {record[place] for record in words.get(field_text(number), ())}
                    assert values <= {field_text(field)}, f"seed {seed}, record {field_text(number)}:\n{text}"
    assert known > total / 5 > 10
