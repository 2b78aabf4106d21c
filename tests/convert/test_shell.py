"""Scripts are read as bash reads them, as far as they can be without running; the reference is bash."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_cp.convert.shell import ScriptCommand, read_script
from mindspeed_cp.convert.shell.arithmetic import Unsolved, solve
from mindspeed_cp.convert.shell.words import field_text
from mindspeed_cp.errors import ConfigError
from tests.convert.bash import needs_bash, words_by_bash


def last_record(source: str) -> ScriptCommand:
    """Return the last command of a script that begins with `record`."""
    commands = [c for c in read_script(source, "script") if c.fields and field_text(c.fields[0]) == "record"]
    return commands[-1]


def words(source: str) -> list[str]:
    """Return the words of the last `record`, which must all be known."""
    command = last_record(source)
    assert not [piece.unknown for field in command.fields for piece in field if piece.unknown]
    return list(map(field_text, command.fields))


KNOWN = [
    "A=1; record $A ${A} \"$A\" '$A' \\$A x$A\"y\"'z'",
    'A=" --x 1 \\\n   --y \'2 3\' \\\n "; record $A "$A"',
    'A="a b"; B="$A c"; record ${B}d "${B}d" x$B',
    'H=; A=(1 "2 3" $((1+1))); A+=(--w "$H"x); record ${A[@]} "${A[@]}" "${A[*]}" ${A[1]} "${A[1]}" $A',
    'M=; A=(); record x "${A[@]}" ${A[@]} y "" "$M"z',
    "A=(  # comment\n  --one 1 # ( ' \"\n  --two)\nrecord ${A[@]}  # rest",
    "record ${NONE:-8} ${NONE-9} ${NONE:-'a b'} \"${NONE:-a b}\" ${NONE:-a b} y",
    'A=4; record ${A:-8} ${A:+set} ${A-9}; B=; record "${B:-x}" ${B-y}z ${B:+n}',
    ": ${CP:=4}; record $CP ${CP}",
    "A=3 B=4; record $((A*B)) $((${A} + $B*2)) $(( (A+B) % 4 - -1 )) $((-7/2)) $((-7%2)) \"$(( A / 2 ))\"",
    "A=3; A+=4; record $A; export B=$A C=x; declare -a D=(1 2); readonly E=\"a b\"; record $B $C ${D[1]} $E",
    "A=1\nif true; then A=1; else A=1; fi\nrecord $A",
    "A=x; record a b | tee /dev/null\nrecord $A >out 2>&1 <in a\\ b &>/dev/null &\nwait",
    "cat <<'EOF' >/dev/null\nrecord no \"\nEOF\nrecord yes",
    "cat <<-A <<B >/dev/null\n\trecord 1\n\tA\nrecord 2\nB\nrecord <<< here yes",
    "f() { record $X in; }\nX=1; record out; # record f\n",
    "case x in a|b) record 1;; (x) record 2 ;; esac; record 3",
    "for i in 1 2; do record $i; done; record end",
    "[ -z \"$NONE\" ] && A=5; [[ a < b && (c > d) ]] || true; record ok",
    "X=5 record a; X=6; record b$X",
    "{ A=1; record $A; }; (A=2; record $A); record last",
    "record a#b '#' \\# \"a\"'b'  #c",
    "record --x=${NONE:-1}--y $'plain' \"$\" a$ ~x",
    "function g { A=1; }\nrecord 1",
    "A='--x\n--y  2'; record $A \"$A\"",
    "if [ 1 = 1 ]; then\n  if false; then :; fi\nelif true; then A=3; else A=4; fi; record done",
    "while read -r L; do A=1; done </dev/null; record fine; ((A++)); record $(( 1 )) fine",
    "A=\"a\\\"b\\\\c\\$d\\`e\\x\"; record \"$A\"",
    "time record x; ! record y; record z",
    "A=2; let B=A+1; f() { shift; }; record $A ${A:?not set} ${A?}",
    "A=1; for i in 1 2; do A=2; record $A; done; until true; do :; done; record x${NONE:-}",
    'export "A=b c" D=e; record "$A" $D',
    'A="--x 1"; for i in 1; do record $A; done',
    "A=4; (( A > 3 && A <= 5 || A == 7 || A != 8 )); record $A",
    "A=1; f() { local A=2; record $A; }; f; record end",
    "set -euo pipefail; A=1; set +x -o errexit; record $A",
    'A=(1 2); A+=" y"; record "$A" "${A[@]}"; A=z; record "$A" "${A[@]}"; B=; B+=(x); record "${B[@]}" $A ${A[1]}',
]  # fmt: skip


@needs_bash
@pytest.mark.parametrize("source", KNOWN)
def test_words_are_those_of_bash(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text(source)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "in").write_text("")
    assert words(source) == words_by_bash(tmp_path / "script.sh", tmp_path / "run")


UNKNOWN = [
    ("record $A", "A", 1, "not set"),
    ("\nrecord x $1", "$1", 2, "not set"),
    ('record "$@"', "$@", 1, "not set"),
    ("A=$(date)\nrecord $A", "$(date)", 1, "when the script runs"),
    ("A=`date +%s`; record $A", "`date +%s`", 1, "when the script runs"),
    ("A=2; B=${A%x}; record $B", "${A%x}", 1, "when the script runs"),
    ("B=$((A * 2)); record $B", "$((A * 2))", 1, "needs A"),
    ("B=$((1 << 2)); record $B", "$((1 << 2))", 1, "not computed"),
    ("B=010; record $((B))", "$((B))", 1, "needs B"),
    ("A=1\nif x; then\nA=2\nfi\nrecord $A", "A", 3, "in a branch"),
    ("if x; then\nA=2; else A=3\nfi\nrecord $A", "A", 2, "in a branch"),
    ("case $x in\n1) A=1;;\n*) A=2;;\nesac\nrecord $A", "A", 3, "in a branch"),
    ("[ -z $X ] && A=4\nrecord $A", "A", 1, "in a branch"),
    ("for A in 1 2; do :; done; record $A", "1 2", 1, "when the script runs"),
    ("read -r A; record $A", "read -r A", 1, "when the script runs"),
    ("A=1; unset A; record $A", "unset A", 1, "when the script runs"),
    ("f() {\nA=1\n}\nf\nrecord $A", "A", 2, "in a branch"),
    ("(A=1); record $A", "A", 1, "in a branch"),
    # Assignments that are not of the form name=value
    ("A=8; let A=A/2\nrecord $A", "let A=A/2", 1, "when the script runs"),
    ('A=8; N=2; let "A = A / $N"; record $A', "let", 1, "when the script runs"),
    ("A=8; ((A/=2)); record $A", "((A/=2))", 1, "when the script runs"),
    ("A=8; ((A++)); record $A", "((A++))", 1, "when the script runs"),
    ("A=8; record $((--A))", "$((--A))", 1, "not computed"),
    ("A=8; record $((A-- - 1))", "$((A-- - 1))", 1, "not computed"),
    ("A=8; : $((--A)); record $A", "$((--A))", 1, "not computed"),
    ("A=8; : $((A/=2)); record $A", "$((A/=2))", 1, "not computed"),
    ("A=8; printf -v A 4; record $A", "printf -v A 4", 1, "when the script runs"),
    ('A=8; eval "A=4"; record $A', "A", 1, "set by eval"),
    ('B=A; A=8; eval "$B=4"; record $A', "A", 1, "set by eval"),
    # Values that another iteration, or a command before the call, may set
    ("A=1\nfor i in 1 2; do\nrecord $A\nA=2\ndone", "A", 4, "is set in a loop"),
    ("A=8; for i in 1 2; do\nA=4; x && break; A=8; done; record $A", "A", 2, "is set in a loop that may end before"),
    ("A=1; while true; do record $A; ((A*=2)); done", "A", 1, "is set in a loop"),
    ("A=1; until record $A; do A=2; done", "A", 1, "is set in a loop"),
    ("bump() { A=2; }; A=1; for i in 1 2; do record $A; bump; done", "A", 1, "is set in a loop"),
    ("A=2\nrun() { record $A; }\nA=8\nrun", "A", 3, "behind the function"),
    ("A=2; run() { record $A; A=3; }; run; run", "A", 1, "behind the function"),
    ("f() { A=8; }; g() { f; }; A=2; g; record $A", "A", 1, "is set in the function g"),
    ("f() { A=8; }; A=2; run() { record $A; }; f; run", "A", 1, "behind the function"),
    # Arguments
    ("f() { record $1; }; f x", "$1", 1, "is an argument of a function"),
    ("shift; record $1", "$1", 1, "is what line 1 leaves"),
    ("set -- a b; record ${2}", "$2", 1, "is what line 1 leaves"),
    ("for i in 1 2; do record $1; shift; done", "$1", 1, "is what a loop leaves"),
    # Words of the caller
    ('record "${A[@]}"', "A", 1, "not set"),
    ("record ${A:?give it}", "A", 1, "not set"),
    ("record ${A:+x}", "A", 1, "may be set or not"),
    ("for i in 1 2; do record ${A+x}; A=1; done", "A", 1, "may be set or not"),
    ("A=; record ${A:?give it}", "A", 1, "not set"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "line", "cause"), UNKNOWN)
def test_what_is_not_known_says_its_name_and_line(source: str, name: str, line: int, cause: str) -> None:
    unknowns = [piece.unknown for field in last_record(source).fields for piece in field if piece.unknown]
    (unknown,) = unknowns
    assert name in unknown.name or name == "1 2" or unknown.name == name, unknown
    assert unknown.line == line and cause in unknown.cause


def test_a_branch_keeps_what_comes_before_it() -> None:
    command = last_record('A="--x 1"\nif y; then A="$A --z"; fi\nB=(1); if y; then B+=(2); fi; record $A ${B[@]}')
    texts = list(map(field_text, command.fields))
    assert texts == ["record", "--x", "1", "${A}", "1", "${B}"]
    assert [piece.unknown.texts for field in command.fields for piece in field if piece.unknown] == [(" --z",), ("2",)]


def recorded(source: str, defined: dict[str, str] | None = None) -> ScriptCommand:
    """Return the last `record`, wherever it stands."""
    commands = [c for c in read_script(source, "script", defined) if c.fields and field_text(c.fields[0]) == "record"]
    return commands[-1]


def test_what_a_loop_appends_leaves_what_was_before() -> None:
    command = recorded('A="--x 1"; B=(2); for i in 1 2; do A="$A --z"; B+=(y); done; record $A ${B[@]}')
    assert list(map(field_text, command.fields)) == ["record", "--x", "1", "${A}", "2", "${B}"]
    inside = recorded('A="--x 1"; B=(2); for i in 1 2; do record $A ${B[@]}; A+=" --z"; B=("${B[@]}" y); done')
    assert list(map(field_text, inside.fields)) == ["record", "--x", "1", "${A}", "2", "${B}"]
    assert {piece.unknown.cause for field in inside.fields for piece in field if piece.unknown} == {"is set in a loop"}


@pytest.mark.parametrize("reader", ["source model.conf", ". ./model.conf", "eval $(cat model.conf)"])
def test_a_file_that_is_read_puts_values_before_it_in_doubt(reader: str) -> None:
    command = recorded(f"A=1\n{reader}\nB=2\nC=$((A + 1))\nrecord $A $B $C")
    assert [field[0].before_file for field in command.fields] == [None, 2, None, 2]
    assert [field[0].before_file for field in recorded(f"A=1; {reader}; record $A", {"A": "3"}).fields] == [None, None]


def test_unknown_words_in_quotes_are_several_only_for_arrays_and_arguments() -> None:
    for source, quoted in [('"$A"', True), ('"${A}"', True), ("$A", False), ('"${A[@]}"', False), ('"$@"', False),
                           ('"${A[@]:1}"', False), ('"${@:2}"', False), ('"${!A[@]}"', False), ('"${A:1}"', True),
                           ('B=$A; record "$B"', True), ('B="$A"; record $B', False)]:  # fmt: skip
        command = recorded(source if "record" in source else f"record {source}")
        assert [piece.quoted for field in command.fields[1:] for piece in field] == [quoted], source


def test_a_defined_array_has_words() -> None:
    for use in ('"${A[@]}"', "${A[@]}", '"${A[*]}"', "$A"):
        texts = list(map(field_text, recorded(f"record {use}", {"A": "--x 1"}).fields))
        assert texts == (["record", "--x 1"] if use == '"${A[*]}"' else ["record", "--x", "1"]), use


def test_arguments_that_the_user_gives_are_those_of_the_script_alone() -> None:
    source = "record $1; f() { record $1; }; f 2; record $1; shift; record $1"
    commands = [c for c in read_script(source, "script", {"1": "8"}) if field_text(c.fields[0]) == "record"]
    assert [field_text(c.fields[1]) for c in commands if not c.fields[1][0].unknown] == ["8", "8"]
    assert len(commands) == 4


def test_loops_inside_each_other_end() -> None:
    source = "for i in 1; do A=1; " * 3000 + "record $A;" + "done;" * 3000
    with pytest.raises(ConfigError, match="than a launch script has"):
        list(read_script(source, "script"))


def test_defined_values_take_precedence() -> None:
    source = "CP=4; if x; then CP=8; fi; record $CP ${1:-9} $((CP * 2))"
    (command,) = (
        c for c in read_script(source, "script", {"CP": "2", "1": "5"}) if field_text(c.fields[0]) == "record"
    )
    assert list(map(field_text, command.fields)) == ["record", "2", "5", "4"]


def test_pieces_stand_where_they_say() -> None:
    source = 'CP=8\nARGS="--x ${CP} \\\n --y"\nrecord $ARGS \'q r\'"s"'
    for field in last_record(source).fields:
        for piece in field:
            start, stop = piece.span
            assert source[start:stop] == piece.text
            assert all(source[first] == "$" for first, _ in piece.references)


@pytest.mark.parametrize(
    ("source", "line"),
    [("\n'a", 2), ('x "a\nb', 1), ("A=(1\n2", 1), ("$(a", 1), ("\n\n${a", 3), ("`x", 1), ("${A:-${B:-" * 12, 1)],
)
def test_what_is_not_closed_is_an_error_with_its_line(source: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^script:{line}: "):
        list(read_script(source, "script"))


@pytest.mark.parametrize("doubling", ['A="$A$A"', "A+=$A", "A=(${A[@]} ${A[@]})"])
def test_variables_that_double_are_refused(doubling: str) -> None:
    with pytest.raises(ConfigError, match="more text than a launch script"):
        list(read_script("A='x y'\n" + f"{doubling}\n" * 60 + "record $A", "script"))


def test_expressions_end() -> None:
    for expression in ("(" * 60, "1" + "+1" * 200, "9" * 40, "9**9**9", "1/0", "1%0", "", "1 2", "a"):
        with pytest.raises(Unsolved):
            solve(expression, lambda name: None)
    assert solve("-" * 90 + "1", lambda name: None) == 1


TOKENS = ["A=1", "A=", "A+=2", "B=(1 2)", "$A", "${A}", '"$A"', "${B[@]}", '"${B[@]}"', "${N:-3}", "x", "'y z'", " ", " ",
          ";", "\n", "\\\n", "$((A+1))", "#c\n", '"', "'", "(", ")", "{", "}", "if ", "then ", "else ", "fi", "case ",
          " in ", "esac", ";;", "&&", "||", "|", "<<E\n", "E\n", "$(", "`", "${", "[[ ", "]]", "f()", "for ", "do ",
          "done", "record ", "\\", "$", "<(", ">", "--x ", "é", "\x00", "((", "))"]  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(TOKENS), max_size=40).map("".join))
def test_any_text_gives_commands_or_a_line(source: str) -> None:
    try:
        commands = list(read_script(source, "script"))
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    for command in commands:
        for field in command.fields:
            for piece in field:
                assert piece.unknown or piece.span == (0, 0) or piece.text in source or piece.text.lstrip("-").isdigit()


SAFE = ["A=1; ", 'A="$A b"; ', "B=(1 \"2 3\"); ", "B+=($A); ", "C=$((2+3)); ", 'D="${B[*]} ${N:-n}"; ', "A=${B[1]}; ",
        "E='--x\n --y'; ", 'A+="c "; ', "B=(\"${B[@]}\" z); ", 'C="$C"; ']  # fmt: skip


@needs_bash
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(statements=st.lists(st.sampled_from(SAFE), max_size=8), number=st.integers(0, 10**12))
def test_assignments_in_any_order_are_those_of_bash(statements: list[str], number: int, tmp_path: Path) -> None:
    start = "A=0; B=(0); C=; D=d; E=e; "
    source = start + "".join(statements) + 'record $A "$A" ${B[@]} "${B[@]}" "${B[*]}" $B $C "$D" $E "$E"x'
    folder = tmp_path / f"{number}_{abs(hash(source))}"
    folder.mkdir(exist_ok=True)
    (folder / "script.sh").write_text(source)
    assert words(source) == words_by_bash(folder / "script.sh", folder / "run")
