"""The statements of a shell script: assignments, simple commands, and the borders of branches."""

from __future__ import annotations

import re
from dataclasses import replace

from mindspeed_cp.convert.shell.arithmetic import assigned_names
from mindspeed_cp.convert.shell.changes import plain_text
from mindspeed_cp.convert.shell.commands import read_command, unknown_assignments
from mindspeed_cp.convert.shell.reader import Reader
from mindspeed_cp.convert.shell.words import Assignment, Branch, Opaque, Statement, Text

_FUNCTION = re.compile(r"[\w.:-]+[ \t]*\([ \t]*\)", re.ASCII)
_KEYWORD = re.compile(r"[A-Za-z]+(?=[\s;&|()]|$)|[{}](?=[\s;&|()]|$)|!(?=\s)|\[\[(?=\s)")
_IN = re.compile(r"in\b")
_ESAC = re.compile(r"esac\b")
_KEYWORDS = frozenset(
    {"if", "then", "elif", "else", "fi", "for", "select", "while", "until", "do", "done"}
    | {"case", "esac", "in", "{", "}", "!", "time"}
)


def parse_script(source: str, name: str) -> list[Statement]:
    """Return the statements of a script in the order of its text.

    Commands of a loop, a function, a choice, a subshell, or behind `&&` or `||` stand between borders of branches.

    Raises:
        ConfigError: a quote or a bracket is not closed; names the line.
    """
    parser = _Parser(source, name)
    parser.run()
    return _with_ends(parser.statements)


def _with_ends(statements: list[Statement]) -> list[Statement]:
    """Return the statements with the ends of loops and functions at their beginnings."""
    entered: list[int] = []
    ended = list(statements)
    for number, statement in enumerate(statements):
        if isinstance(statement, Branch) and statement.border == "enter":
            entered.append(number)
            ended[number] = replace(statement, stop=len(statements))
        elif isinstance(statement, Branch) and statement.border == "leave":
            start = entered.pop()
            begin = statements[start]
            assert isinstance(begin, Branch)
            ended[start] = replace(begin, stop=number)
    return ended


class _Parser:
    def __init__(self, source: str, name: str) -> None:
        self.reader = Reader(source, name)
        self.statements: list[Statement] = []
        self.open: list[str] = []  # words that open what is not closed yet
        self.here_documents: list[tuple[str, bool]] = []  # ends of here-documents that begin on this line
        self.missing: set[str] = set()  # closing brackets that the rest of the script lacks
        self.guarded = False  # True if the next command stands behind && or ||
        self.function = ""  # name of the function that was read last

    def run(self) -> None:
        reader = self.reader
        self.reader.blanks()
        while reader.letter:
            start = reader.position
            in_case = bool(self.open) and self.open[-1] == "case"
            if reader.letter == "\n":
                reader.position += 1
                self._skip_here_documents()
            elif reader.starts(";;") or reader.starts(";&"):
                reader.position += 3 if reader.starts(";;&") else 2
                self._leave("pattern")
            elif reader.letter in ";|&":
                self._separator()
            elif reader.starts("((") and self._skip_arithmetic():
                self.guarded = False
            elif reader.letter == "(":
                reader.position += 1
                if not in_case:  # before a pattern
                    self._enter("(")
            elif reader.letter == ")":
                reader.position += 1
                if in_case:  # the end of a pattern
                    self._enter("pattern")
                else:
                    self._leave("(")
            elif in_case and not _ESAC.match(reader.source, start):
                self._pattern()
            else:
                self._statement()
            if reader.position == start:  # a letter that begins nothing
                reader.position += 1
            self.reader.blanks()

    def _separator(self) -> None:
        reader = self.reader
        double = reader.starts("&&") or reader.starts("||")
        reader.position += 2 if double else 1
        self.guarded = double

    def _skip_brackets(self, opening: str, closing: str) -> bool:
        end = -1
        if closing not in self.missing:
            end = self.reader.source.find(closing, self.reader.position + len(opening))
        if end < 0:
            self.missing.add(closing)
            return False
        self.reader.position = end + len(closing)
        return True

    def _skip_arithmetic(self) -> bool:
        """Skip `((expression))`; the variables that it sets are not known from here on."""
        start = self.reader.position
        if not self._skip_brackets("((", "))"):
            return False
        span = start, self.reader.position
        self.statements += unknown_assignments(assigned_names(self.reader.source[span[0] + 2 : span[1] - 2]), span)
        return True

    def _skip_here_documents(self) -> None:
        reader = self.reader
        for end, strips in self.here_documents:
            while reader.letter:
                stop = reader.source.find("\n", reader.position)
                stop = len(reader.source) if stop < 0 else stop
                line = reader.source[reader.position : stop]
                reader.position = stop + 1
                if (line.lstrip("\t") if strips else line) == end:
                    break
        self.here_documents.clear()

    def _pattern(self) -> None:
        """Skip the pattern of a case up to its closing bracket."""
        reader = self.reader
        while reader.letter and reader.letter != ")":
            if not reader.word():
                reader.position += 1

    def _statement(self) -> None:
        reader, start = self.reader, self.reader.position
        keyword = _KEYWORD.match(reader.source, start)
        if keyword and self._keyword(keyword[0]):
            return
        function = _FUNCTION.match(reader.source, start)
        if function:
            reader.position = function.end()
            self.function = function[0].partition("(")[0].rstrip()
            self.open.append("function")
            return
        guarded, self.guarded = self.guarded, False
        if guarded:
            self.statements.append(Branch("enter"))
        self.statements += read_command(self.reader, self.here_documents)
        if guarded:
            self.statements.append(Branch("leave"))

    def _keyword(self, word: str) -> bool:
        """Read a keyword of the shell; return False if the word is none."""
        reader, is_function = self.reader, bool(self.open) and self.open[-1] == "function"
        if word == "function":
            reader.position += len(word)
            self.reader.blanks()
            self.function = plain_text(reader.word())
            self.reader.blanks()
            if reader.starts("()"):
                reader.position += 2
            self.open.append("function")
            return True
        if word == "[[":
            return self._skip_brackets("[[", "]]")
        if word not in _KEYWORDS or (word == "in" and not self.open):
            return False
        reader.position += len(word)
        if word == "{":
            if is_function or self.guarded:
                self._enter("function {")
            else:
                self.open.append("{")
        elif word == "}":
            if self.open and self.open[-1] == "{":
                self.open.pop()
            else:
                self._leave("function {")
        elif word == "do" and self.open and self.open[-1] == "while":
            self.open[-1] = "do"
        elif word in ("then", "do"):
            if word == "do" and self.open and self.open[-1] == "for":
                self.open.pop()
            self._enter(word)
        elif word in ("while", "until"):
            self._enter("while")
        elif word in ("elif", "else"):
            if self.open and self.open[-1] == "then":
                self.open[-1] = word
            if word == "else" and self.open and self.open[-1] == "else":
                self.statements.append(Branch("next"))
            elif self.open and self.open[-1] == "elif":
                self.open[-1] = "then pending"
        elif word == "fi":
            self._leave("then", "else", "then pending")
        elif word == "done":
            self._leave("do")
        elif word in ("for", "select"):
            self._loop()
            self.open.append("for")
        elif word == "case":
            self.reader.blanks()
            reader.word()
            self.open.append("case")
            self.statements.append(Branch("enter"))
            self.reader.blanks()
            if _IN.match(reader.source, reader.position):
                reader.position += 2
        elif word == "esac":
            self._leave("pattern")
            if "case" in self.open:
                while self.open.pop() != "case":
                    pass
                self.statements.append(Branch("leave"))
        return True

    def _loop(self) -> None:
        """Read `for name in words`, or `for ((...))`."""
        reader = self.reader
        self.reader.blanks()
        if reader.starts("((") and self._skip_arithmetic():
            return
        start = reader.position
        name = "".join(part.text for part in reader.word() if isinstance(part, Text))
        self.statements.append(Assignment(name, ((Opaque((start, reader.position), True),),), False, False, start))
        while reader.letter and reader.letter not in "\n;":
            self.reader.blanks()
            if not reader.word() and reader.letter not in ("\n", ";"):
                reader.position += 1

    def _enter(self, word: str) -> None:
        self.guarded = False
        kind, name = "loop" if word in ("do", "while") else "", ""
        if self.open and self.open[-1] == "function":
            self.open.pop()
            kind, name = "function", self.function
        if word == "then" and self.open and self.open[-1] == "then pending":
            self.open[-1] = "then"
            self.statements.append(Branch("next"))
        elif word == "pattern":
            self.open.append(word)
            self.statements.append(Branch("next"))
        else:
            self.open.append(word)
            self.statements.append(Branch("enter", kind=kind, name=name))

    def _leave(self, *words: str) -> None:
        """Close the innermost open branch if it is one of these."""
        self.guarded = False
        if self.open and self.open[-1] in words:
            word = self.open.pop()
            if word != "pattern":  # its case goes on
                self.statements.append(Branch("leave", complete=word == "else"))
