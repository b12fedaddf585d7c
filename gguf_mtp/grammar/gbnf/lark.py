"""GBNF as the Lark that llguidance reads.

GBNF speaks of characters, Lark of terminals that take as much as they can; so a grammar without
recursion becomes one terminal, and one with recursion keeps its rules, down to single characters
and to terminals that cannot take too much: either says exactly what the GBNF said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from gguf_mtp.errors import RequestError
from gguf_mtp.grammar.gbnf.nodes import (
    Alternatives,
    Chars,
    Many,
    Node,
    Ref,
    Seq,
    TerminalNode,
    Text,
    Token,
)
from gguf_mtp.grammar.gbnf.parser import MAX_RULES, Parser
from gguf_mtp.grammar.gbnf.terminals import parts, with_terminals

__all__ = ["lark_of", "to_lark"]

MAX_DEPTH = 6
"""Of brackets inside of brackets."""
LARK = "%llguidance"
"""What a grammar in Lark begins with, as in llama.cpp; others are GBNF."""


def lark_of(source: str, token_of: Callable[[str], int | None]) -> str:
    """Lark for a grammar in GBNF, or in Lark if it begins with `%llguidance`.

    Raises `RequestError` with line and column.
    """
    return source if source.lstrip().startswith(LARK) else to_lark(source, token_of)


def to_lark(source: str, token_of: Callable[[str], int | None]) -> str:
    """Lark for a grammar whose start is `root`; `token_of` finds the token that a text is.

    Raises `RequestError` with line and column.
    """
    parser = Parser(source, token_of)
    rules = parser.rules()
    if "root" not in rules:
        raise RequestError("there is no rule called root")
    used = _reachable(rules, parser)
    if len(used) > MAX_RULES:
        raise RequestError(
            f"the grammar has {len(used)} rules, but at most {MAX_RULES} are allowed"
        )
    rules = {name: rules[name] for name in used}
    is_regular = not _is_recursive(rules) and not any(parts(n, Token) for n in rules.values())
    if not is_regular:
        rules = with_terminals(rules)
    prefix = "T" if is_regular else "r"
    names: dict[str | Node, str] = {name: f"{prefix}{i}" for i, name in enumerate(rules)}
    terminals = dict.fromkeys(t.node for n in rules.values() for t in parts(n, TerminalNode))
    names |= {node: f"T{i}" for i, node in enumerate(terminals)}
    writer = _Writer(names)
    for name, rule in rules.items():
        writer.define(names[name], rule, is_regular)
    for node in terminals:
        writer.define(names[node], node, True)
    return "\n".join([f"start: {names['root']}", *writer.lines])


def _reachable(rules: Mapping[str, Node], parser: Parser) -> list[str]:
    """The rules that `root` leads to, itself first."""
    found, left = {"root": None}, ["root"]
    for name in left:  # grows meanwhile
        for ref in parts(rules[name], Ref):
            if ref.name not in rules:
                raise parser.wrong(f"there is no rule called {ref.name}", ref.at)
            if ref.name not in found:
                found[ref.name] = None
                left.append(ref.name)
    return left


def _is_recursive(rules: Mapping[str, Node]) -> bool:
    """Whether some rule leads back to itself: then not all can be put away, innermost first."""
    left = {name: {ref.name for ref in parts(rule, Ref)} for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, refs in left.items():
        for ref in refs:
            users[ref].append(name)
    leaves = [name for name, refs in left.items() if not refs]
    for leaf in leaves:  # grows meanwhile
        del left[leaf]
        for user in users[leaf]:
            left[user].discard(leaf)
            if not left[user]:
                leaves.append(user)
    return bool(left)


class _Writer:
    """Writes definitions; rules and terminals have `names`."""

    def __init__(self, names: Mapping[str | Node, str]) -> None:
        self.lines: list[str] = []
        self._names = names
        self._n_more = 0

    def define(self, name: str, node: Node, is_regular: bool) -> None:
        """`is_regular`: as a terminal, where a literal is in one piece."""
        self.lines.append(f"{name}: {self._text(node, is_regular, 0)}")

    def _group(self, node: Node, is_regular: bool, depth: int) -> str:
        """`node` as one item; what is deep inside gets a name of its own, for llguidance reads no
        more than some levels of brackets."""
        if isinstance(node, Chars | Token | Ref | TerminalNode):
            return self._text(node, is_regular, depth)
        if depth < MAX_DEPTH:
            return f"({self._text(node, is_regular, depth + 1)})"
        self._n_more += 1
        name = f"{'X' if is_regular else 'x'}{self._n_more}"
        self.define(name, node, is_regular)
        return name

    def _text(self, node: Node, is_regular: bool, depth: int) -> str:
        match node:
            case Chars(regex, _):
                return f"/{regex}/"
            case Text(text):
                pieces = [text] if is_regular or not text else text
                return " ".join(map(json.dumps, pieces))
            case Token(lark):
                return lark
            case Ref(name, _):
                return self._names[name]
            case TerminalNode(inner):
                return self._names[inner]
            case Many(inner, least, most):
                item = self._group(inner, is_regular, depth)
                return f"{item}{{{least},{'' if most is None else most}}}"
            case Seq(nodes):
                return " ".join(self._group(n, is_regular, depth) for n in nodes) or '""'
            case Alternatives(nodes):
                return " | ".join(self._group(n, is_regular, depth) for n in nodes)
