"""Words of a shell script: quotes, escapes, and expansions, of which nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindspeed_cp.convert.shell.words import Arithmetic, Opaque, Parameter, Text, Word
from mindspeed_cp.errors import ConfigError

MAX_NESTING = 20  # of ${name:-${name:-...}}
META = frozenset(" \t\n;|&()<>")

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]", re.ASCII)
_BRACED = re.compile(r"\{([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([@*]|[0-9]{1,9})\])?(:?[-=+?]|\})", re.ASCII)
_LIST = re.compile(r"\{!?(?:[@*]|[A-Za-z_]\w*\[[@*]\])", re.ASCII)  # of arguments or of an array: several words
_PLAIN = re.compile(r"[^\s;|&()<>\\'\"$`]+")
_PLAIN_QUOTED = re.compile(r"[^\\\"$`]+")
_PLAIN_OPERAND = re.compile(r"[^\\'\"$`}]+")
_CONTINUED = re.compile(r"(?:[ \t]|\\\n)*")
_CLOSING = {"(": ")", "{": "}"}


@dataclass
class Reader:
    """A place in a script, and the readers of what stands there.

    Attributes:
        source: text of the script.
        name: its name in errors.
        position: offset of the next letter.
    """

    source: str
    name: str
    position: int = 0

    @property
    def letter(self) -> str:
        """The next letter; empty at the end."""
        return self.source[self.position : self.position + 1]

    def starts(self, text: str) -> bool:
        """Return True if a text stands at the place."""
        return self.source.startswith(text, self.position)

    def error(self, start: int, problem: str) -> ConfigError:
        """Return the error of a place."""
        return ConfigError(f"{self.name}:{self.source.count(chr(10), 0, start) + 1}: {problem}")

    def blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        match = _CONTINUED.match(self.source, self.position)
        assert match is not None
        self.position = match.end()
        if self.letter == "#":
            end = self.source.find("\n", self.position)
            self.position = end if end >= 0 else len(self.source)

    def word(self) -> Word:
        """Read a word; empty if none stands at the place."""
        parts: list[Text | Parameter | Arithmetic | Opaque] = []
        while self.letter and (self.letter not in META or self.starts("<(") or self.starts(">(")):
            start, letter = self.position, self.letter
            plain = _PLAIN.match(self.source, start)
            if plain:
                self.position = plain.end()
                parts.append(Text(plain[0], start, False))
            elif letter == "'":
                parts.append(self._single_quotes())
            elif letter == '"' or self.starts('$"'):
                parts += self._double_quotes()
            elif letter in "<>":
                self.position += 1
                parts.append(self._skip(start, quoted=True))
            else:
                parts += self._special(start, quoted=False)
        return tuple(parts)

    def _single_quotes(self) -> Text:
        start = self.position + 1
        end = self.source.find("'", start)
        if end < 0:
            raise self.error(start, "a quote (') is not closed")
        self.position = end + 1
        return Text(self.source[start:end], start, True)

    def _double_quotes(self) -> list[Text | Parameter | Arithmetic | Opaque]:
        start = self.position
        self.position = self.source.index('"', start) + 1
        parts: list[Text | Parameter | Arithmetic | Opaque] = [Text("", self.position, True)]
        while self.letter != '"':
            if not self.letter:
                raise self.error(start, 'a quote (") is not closed')
            plain = _PLAIN_QUOTED.match(self.source, self.position)
            if plain:
                parts.append(Text(plain[0], self.position, True))
                self.position = plain.end()
            else:
                parts += self._special(self.position, quoted=True)
        self.position += 1
        return parts

    def _special(self, start: int, quoted: bool, nesting: int = 0) -> list[Text | Parameter | Arithmetic | Opaque]:
        """Read what begins with a backslash, a back quote or a dollar."""
        letter, after = self.letter, self.source[start + 1 : start + 2]
        if letter == "\\":
            self.position += 1 + len(after)
            if after == "\n":
                return []
            if quoted and after not in '\\"$`':
                return [Text("\\" + after, start, True)]
            return [Text(after or "\\", start + 1 if after else start, True)]
        if letter == "`":
            end = self.source.find("`", start + 1)
            if end < 0:
                raise self.error(start, "a back quote is not closed")
            self.position = end + 1
            return [Opaque((start, end + 1), quoted)]
        self.position += 1
        if after == "'" and not quoted:
            text = self._single_quotes()
            return [Opaque((start, self.position), True) if "\\" in text.text else text]
        if after == "(":
            part = self._skip(start, quoted)
            text_inside = self.source[start + 3 : self.position - 2]
            if self.source.startswith("$((", start) and self.source.endswith("))", start, self.position):
                return [Arithmetic(text_inside, part.span, quoted)]
            return [part]
        if after == "{":
            return [self._braces(start, quoted, nesting)]
        name = _NAME.match(self.source, self.position)
        if name is None:
            return [Text("$", start, quoted)]
        self.position = name.end()
        return [Parameter(name[0], (start, name.end()), quoted)]

    def _braces(self, start: int, quoted: bool, nesting: int) -> Parameter | Opaque:
        """Read `${...}`."""
        match = _BRACED.match(self.source, self.position)
        if match is None:
            return self._skip(start, quoted and _LIST.match(self.source, self.position) is None)
        if nesting >= MAX_NESTING:
            raise self.error(start, f"more than {MAX_NESTING} expansions inside each other; give --define instead")
        name, subscript, operator = match.groups()
        self.position = match.end()
        operand: list[Text | Parameter | Arithmetic | Opaque] = []
        while operator != "}" and self.letter != "}":
            if not self.letter:
                raise self.error(start, "${ is not closed")
            plain = _PLAIN_OPERAND.match(self.source, self.position)
            if plain:
                operand.append(Text(plain[0], self.position, quoted))
                self.position = plain.end()
            elif self.letter == "'" and not quoted:
                operand.append(self._single_quotes())
            elif self.letter == "'":
                operand.append(Text("'", self.position, True))
                self.position += 1
            elif self.letter == '"':
                operand += self._double_quotes()
            else:
                operand += self._special(self.position, quoted, nesting + 1)
        if operator != "}":
            self.position += 1
        operator = operator.rstrip("}")
        return Parameter(name, (start, self.position), quoted, subscript or "", operator, tuple(operand))

    def _skip(self, start: int, quoted: bool) -> Opaque:
        """Go behind the bracket that closes the one at the place; quotes and brackets inside may nest."""
        closing = [_CLOSING[self.letter]]
        self.position += 1
        while closing:
            letter = self.letter
            if not letter:
                raise self.error(start, f"{self.source[start : start + 2]} is not closed")
            self.position += 1
            inside_quotes = closing[-1] == '"'
            if letter == closing[-1]:
                closing.pop()
            elif letter == "\\":
                self.position += 1
            elif letter == "$" and self.letter in _CLOSING:
                closing.append(_CLOSING[self.letter])
                self.position += 1
            elif letter == '"':
                closing.append('"')
            elif letter == "'" and not inside_quotes:
                self.position -= 1
                self._single_quotes()
            elif letter == "(" and not inside_quotes:
                closing.append(")")
        return Opaque((start, self.position), quoted)
