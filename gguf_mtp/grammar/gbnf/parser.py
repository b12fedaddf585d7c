"""Reads GBNF, llama.cpp's grammar format (`grammars/README.md`, `src/llama-grammar.cpp`).

What the rules mean to a sampler is decided in `lark.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.gbnf.nodes import (
    LAST_CHAR,
    Alternatives,
    Chars,
    Many,
    Node,
    Ranges,
    Ref,
    Seq,
    Text,
    Token,
)

__all__ = ["Parser"]

MAX_NESTED = 100
"""Groups inside of groups."""
MAX_DEPTH = 250
"""Groups, alternatives and repetitions inside of each other: what reads a rule recurses so far."""
MAX_RULES = 1000
"""Rules that `root` leads to; see `matching.MAX_RULES`."""
MAX_STACKED = 10
"""Repetitions of one item, as in `a*?`."""
MAX_REPEATS = 2000
"""llama.cpp's bound (`MAX_REPETITION_THRESHOLD`)."""

_ESCAPES = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45}
_HEX = {"x": 2, "u": 4, "U": 8}


class Parser:
    """Reads rules one after the other; `at` is where it stands in `text`. `token_of` finds the
    token that a text is."""

    def __init__(self, text: str, token_of: Callable[[str], int | None]) -> None:
        self.text, self.at = text, 0
        self._token_of = token_of
        self._n_nested = 0

    def wrong(self, what: str, at: int | None = None) -> RequestError:
        """An error that names the place: `at` in the text, or where the parser stands."""
        before = self.text[: self.at if at is None else at]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        return RequestError(f"line {line}, column {column}: {what}")

    def rules(self) -> dict[str, Node]:
        """All of them by name. Raises `RequestError` with line and column."""
        found: dict[str, Node] = {}
        self._skip(lines=True)
        while self.at < len(self.text):
            name = self._name()
            self._skip(lines=False)
            if not self._take("::="):
                raise self.wrong("expected ::=")
            self._skip(lines=True)
            start = self.at
            found[name] = self._choice(is_nested=False)
            if _depth(found[name]) > MAX_DEPTH:
                raise self.wrong(
                    f"this rule nests groups and repetitions more than {MAX_DEPTH} deep", start
                )
            if self.at < len(self.text) and self._peek() not in "\r\n":
                raise self.wrong("expected the end of the line")
            self._skip(lines=True)
        return found

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, what: str) -> bool:
        found = self.text.startswith(what, self.at)
        self.at += len(what) if found else 0
        return found

    def _skip(self, lines: bool) -> None:
        """White space and comments; line breaks too if `lines`."""
        while self.at < len(self.text):
            if self._peek() == "#":
                ends = [i for c in "\r\n" if (i := self.text.find(c, self.at)) >= 0]
                self.at = min(ends, default=len(self.text))
            elif self._peek() in (" \t\r\n" if lines else " \t"):
                self.at += 1
            else:
                return

    def _name(self) -> str:
        start = self.at
        while self._peek() and (self._peek().isalnum() or self._peek() in "-_"):
            self.at += 1
        if self.at == start:
            raise self.wrong("expected the name of a rule")
        return self.text[start : self.at]

    def _choice(self, is_nested: bool) -> Node:
        nodes = [self._sequence(is_nested)]
        while self._take("|"):
            self._skip(lines=True)
            nodes.append(self._sequence(is_nested))
        return Alternatives(tuple(nodes)) if len(nodes) > 1 else nodes[0]

    def _sequence(self, is_nested: bool) -> Node:
        nodes: list[Node] = []
        while (node := self._item()) is not None:
            nodes.append(self._repeated(node, is_nested))
            self._skip(lines=is_nested)
        return nodes[0] if len(nodes) == 1 else Seq(tuple(nodes))

    def _item(self) -> Node | None:
        start, char = self.at, self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        if char == ".":
            self.at += 1
            return Chars("(?s:.)", ((0, LAST_CHAR),))
        if char and char in "<!":
            return self._token()
        if char and (char.isalnum() or char in "-_"):
            return Ref(self._name(), start)
        return None

    def _repeated(self, node: Node, is_nested: bool) -> Node:
        for _ in range(MAX_STACKED + 1):
            self._skip(lines=is_nested)
            if self._take("*"):
                node = Many(node, 0, None)
            elif self._take("+"):
                node = Many(node, 1, None)
            elif self._take("?"):
                node = Many(node, 0, 1)
            elif self._peek() == "{":
                node = self._counted(node)
            else:
                return node
        raise self.wrong(f"more than {MAX_STACKED} repetitions of one item")

    def _counted(self, node: Node) -> Node:
        start = self.at
        self.at += 1
        least = self._number()
        most: int | None = least
        if self._take(","):
            self._skip(lines=True)
            most = None if self._peek() == "}" else self._number()
        if not self._take("}"):
            raise self.wrong("expected }")
        if max(least, most or 0) > MAX_REPEATS:
            raise self.wrong(f"more than {MAX_REPEATS} repetitions", start)
        if most is not None and most < least:
            raise self.wrong(f"minimum of {least} repetitions exceeds maximum of {most}", start)
        return Many(node, least, most)

    def _number(self) -> int:
        self._skip(lines=True)
        start = self.at
        while self._peek() and self._peek() in "0123456789":
            self.at += 1
        if not 0 < self.at - start < 10:
            raise self.wrong("expected a number", start)
        number = int(self.text[start : self.at])
        self._skip(lines=True)
        return number

    def _group(self) -> Node:
        start = self.at
        self.at += 1
        self._n_nested += 1
        if self._n_nested > MAX_NESTED:
            raise self.wrong(f"more than {MAX_NESTED} nested groups")
        self._skip(lines=True)
        node = self._choice(is_nested=True)
        if not self._take(")"):
            raise self.wrong("this group is not closed", start)
        self._n_nested -= 1
        return node

    def _literal(self) -> Node:
        start, chars = self.at, ""
        self.at += 1
        while not self._take('"'):
            chars += self._char(start)
        return Text(chars)

    def _class(self) -> Node:
        start = self.at
        self.at += 1
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = last = self._char(start)
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._char(start)
            if last < first:
                raise self.wrong(f"the range ends before it begins: {first!r} to {last!r}")
            ranges.append((ord(first), ord(last)))
        if not ranges:
            raise self.wrong("this character class is empty", start)
        held = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
        if is_negated:
            return Chars(f"[^{held}]", _others(ranges))
        return Chars(f"[{held}]", tuple(ranges))

    def _char(self, start: int) -> str:
        """The next character of a literal or a class that began at `start`."""
        char = self._peek()
        if not char:
            raise self.wrong("this literal or character class is not closed", start)
        self.at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self.at += 1
        if kind in _ESCAPES:
            return chr(_ESCAPES[kind])
        n = _HEX.get(kind, 0)
        digits = self.text[self.at : self.at + n]
        if not n or len(digits) < n or any(c not in "0123456789abcdefABCDEF" for c in digits):
            raise self.wrong(f"unknown escape \\{kind}{digits}", self.at - 2)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self.wrong(f"\\{kind}{digits} is not a character", self.at - 2)
        self.at += n
        return chr(code)

    def _token(self) -> Node:
        """`<name>`, `<[id]>`, and with a `!` before it any other token."""
        start = self.at
        sign = "^" if self._take("!") else ""
        end = self.text.find(">", self.at)
        if self._peek() != "<" or end < 0:
            raise self.wrong("expected a token, such as <[5]>", start)
        name = self.text[self.at : end + 1]
        self.at = end + 1
        number = name[2:-2] if name[1:2] == "[" and name[-2:-1] == "]" else ""
        id_ = int(number) if number.isascii() and number.isdigit() else self._token_of(name)
        if id_ is None:
            raise self.wrong(f"the vocabulary has no token {name}", start)
        return Token(f"<[{sign}{id_}]>")


def _depth(node: Node) -> int:
    """How many nodes lie inside of each other, without recursion."""
    depth, level = 0, [node]
    while level:
        depth += 1
        inner: list[Node] = []
        for one in level:
            if isinstance(one, Seq | Alternatives):
                inner += one.nodes
            elif isinstance(one, Many):
                inner.append(one.node)
        level = inner
    return depth


def _others(ranges: list[tuple[int, int]]) -> Ranges:
    """The characters that are in none of `ranges`."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, LAST_CHAR)) if at <= LAST_CHAR else tuple(found)
