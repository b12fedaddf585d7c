"""Which parts of a recursive grammar may be terminals without changing what the grammar says.

A terminal takes as much text as it can. That is harmless where its texts are told apart from all
else by their first character, and where none of them begins another: a JSON string, say. Rows cost
a fraction then of what they cost character by character.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple, TypeVar

from gguf_mtp.grammar.gbnf_nodes import (
    Chars,
    Choice,
    Many,
    Node,
    Ranges,
    Ref,
    Seq,
    Terminal,
    Text,
    Token,
)

__all__ = ["parts", "with_terminals"]

_Kind = TypeVar("_Kind", bound=Node)

MAX_POSITIONS = 400
"""Characters that a terminal's expression may have once its counts are written out."""


class _Automaton(NamedTuple):
    """Glushkov's: the places where a text may begin and end. `is_empty`: it may also be nothing."""

    is_empty: bool
    first: frozenset[int]
    last: frozenset[int]


class _Glushkov:
    """The positions of one expression, each a character class, and which may follow which."""

    def __init__(self) -> None:
        self.chars: list[Ranges] = []
        self.follow: list[set[int]] = []

    def build(self, node: Node) -> _Automaton:
        """Adds the positions of `node`. Raises `_TooLarge` for what cannot be a terminal."""
        match node:
            case Chars(_, ranges):
                return self._position(ranges)
            case Text(text):
                return self._chain([self._position(((ord(c), ord(c)),)) for c in text])
            case Seq(nodes):
                return self._chain([self.build(inner) for inner in nodes])
            case Choice(nodes):
                parts = [self.build(inner) for inner in nodes]
                return _Automaton(
                    any(p.is_empty for p in parts),
                    frozenset().union(*(p.first for p in parts)),
                    frozenset().union(*(p.last for p in parts)),
                )
            case Many(inner, least, most):
                return self._many(inner, least, most)
        raise _TooLarge  # a rule or a token: no part of a terminal

    def _position(self, ranges: Ranges) -> _Automaton:
        if len(self.chars) >= MAX_POSITIONS:
            raise _TooLarge
        self.chars.append(ranges)
        self.follow.append(set())
        at = frozenset([len(self.chars) - 1])
        return _Automaton(False, at, at)

    def _chain(self, parts: Iterable[_Automaton]) -> _Automaton:
        whole = _Automaton(True, frozenset(), frozenset())
        for part in parts:
            self._link(whole.last, part.first)
            whole = _Automaton(
                whole.is_empty and part.is_empty,
                whole.first | part.first if whole.is_empty else whole.first,
                whole.last | part.last if part.is_empty else part.last,
            )
        return whole

    def _many(self, node: Node, least: int, most: int | None) -> _Automaton:
        n_copies = max(least, 1) if most is None else most
        parts = [self.build(node) for _ in range(n_copies)]
        parts = [p._replace(is_empty=p.is_empty or i >= least) for i, p in enumerate(parts)]
        if most is None:
            self._link(parts[-1].last, parts[-1].first)
        return self._chain(parts)

    def _link(self, ends: Iterable[int], begins: Iterable[int]) -> None:
        for end in ends:
            self.follow[end].update(begins)


class _TooLarge(Exception):
    """This cannot be a terminal."""


def with_terminals(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules with terminals in them, as long as each is told apart from all else."""
    refused: set[Node] = set()
    while True:
        made = {name: _split(node, refused) for name, node in rules.items()}
        firsts = {t.node: _first(t.node) for n in made.values() for t in parts(n, Terminal)}
        single = [c.ranges for n in made.values() for c in parts(n, Chars)]
        texts = [t.text for n in made.values() for t in parts(n, Text)]
        single += [((ord(c), ord(c)),) for text in texts for c in text]
        clashing = {
            node
            for node, first in firsts.items()
            if any(_overlap(first, other) for other in single)
            or any(_overlap(first, other) for n, other in firsts.items() if n != node)
        }
        if not clashing:
            return made
        refused |= clashing


def _split(node: Node, refused: set[Node]) -> Node:
    """`node` with terminals in the place of its largest parts that may be one."""
    if node not in refused and _is_told_apart(node):
        return Terminal(node)
    if isinstance(node, Seq):
        n = len(node.nodes)
        for size in range(n - 1, 1, -1):
            for at in range(n - size + 1):
                run = Seq(node.nodes[at : at + size])
                if run not in refused and _is_told_apart(run):
                    before = [_split(part, refused) for part in node.nodes[:at]]
                    after = [_split(part, refused) for part in node.nodes[at + size :]]
                    return Seq((*before, Terminal(run), *after))
        return Seq(tuple(_split(part, refused) for part in node.nodes))
    if isinstance(node, Choice):
        return Choice(tuple(_split(part, refused) for part in node.nodes))
    if isinstance(node, Many):
        return Many(_split(node.node, refused), node.least, node.most)
    return node


def _is_told_apart(node: Node) -> bool:
    """Whether it is text of more than a character, and none of its texts begins another: every
    character leads to one position only, and nothing follows where a text may end."""
    if isinstance(node, Chars | Ref | Token):
        return False
    glushkov = _Glushkov()
    try:
        whole = glushkov.build(node)
    except _TooLarge:
        return False
    if whole.is_empty or len(glushkov.chars) < 2 or any(glushkov.follow[p] for p in whole.last):
        return False
    return not any(
        _overlap(glushkov.chars[a], glushkov.chars[b])
        for places in (whole.first, *glushkov.follow)
        for a, b in combinations(places, 2)
    )


def _first(node: Node) -> Ranges:
    """The characters that a text of `node` begins with."""
    glushkov = _Glushkov()
    whole = glushkov.build(node)
    return tuple(r for place in whole.first for r in glushkov.chars[place])


def _overlap(a: Ranges, b: Ranges) -> bool:
    return any(x[0] <= y[1] and y[0] <= x[1] for x in a for y in b)


def parts(node: Node, kind: type[_Kind]) -> list[_Kind]:
    """The parts of `node` that are a `kind`; what is inside of a terminal is none."""
    if isinstance(node, kind):
        return [node]
    if isinstance(node, Seq | Choice):
        return [part for inner in node.nodes for part in parts(inner, kind)]
    return parts(node.node, kind) if isinstance(node, Many) else []
