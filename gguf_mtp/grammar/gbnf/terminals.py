"""Which parts of a recursive grammar may be terminals without changing what the grammar says.

A terminal takes as much text as it can. That is harmless where its texts are told apart from all
else by their first character, and where none of them begins another: a JSON string, say. Rows cost
a fraction then of what they cost character by character.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from typing import NamedTuple, TypeVar

from gguf_mtp.grammar.gbnf.nodes import (
    Alternatives,
    Chars,
    Many,
    Node,
    Ranges,
    Ref,
    Seq,
    TerminalNode,
    Text,
    Token,
)

__all__ = ["parts", "with_terminals"]

_Kind = TypeVar("_Kind", bound=Node)

MAX_POSITIONS = 400
"""Characters that a terminal's expression may have once its counts are written out."""
MAX_WORK = 300_000
"""Positions and pairs of positions that may be looked at for one grammar, about half a second of
Python. What is left then stays character by character, which says the same."""


class _Automaton(NamedTuple):
    """Glushkov's: the places where a text may begin and end. `is_empty`: it may also be nothing."""

    is_empty: bool
    first: frozenset[int]
    last: frozenset[int]


_NOTHING = _Automaton(True, frozenset(), frozenset())


class _Glushkov:
    """The positions of one expression, each a character class, and which may follow which.

    `is_clear` as long as every character leads to one position only; what is added later cannot
    make it so again. `work` is taken from for everything that is done.
    """

    def __init__(self, work: _Work) -> None:
        self.chars: list[Ranges] = []
        self.follow: list[set[int]] = []
        self.is_clear = True
        self._work = work

    def build(self, node: Node) -> _Automaton:
        """Adds the positions of `node`. Raises `_TooLarge` for what cannot be a terminal."""
        match node:
            case Chars(_, ranges):
                return self._position(ranges)
            case Text(text):
                return self._chain([self._position(((ord(c), ord(c)),)) for c in text])
            case Seq(nodes):
                return self._chain([self.build(inner) for inner in nodes])
            case Alternatives(nodes):
                return reduce(self._either, [self.build(inner) for inner in nodes])
            case Many(inner, least, most):
                return self._many(inner, least, most)
        raise _TooLarge  # a rule or a token: no part of a terminal

    def then(self, whole: _Automaton, part: _Automaton) -> _Automaton:
        """`whole` with `part` behind it."""
        self._link(whole.last, part.first)
        if whole.is_empty:
            self._look(whole.first, part.first)
        return _Automaton(
            whole.is_empty and part.is_empty,
            whole.first | part.first if whole.is_empty else whole.first,
            whole.last | part.last if part.is_empty else part.last,
        )

    def is_told_apart(self, whole: _Automaton) -> bool:
        """Whether `whole` is text of more than a character, and none of its texts begins
        another."""
        ends = any(self.follow[p] for p in whole.last)
        return self.is_clear and not whole.is_empty and len(self.chars) >= 2 and not ends

    def _position(self, ranges: Ranges) -> _Automaton:
        if len(self.chars) >= MAX_POSITIONS:
            raise _TooLarge
        self._work.take(1)
        self.chars.append(ranges)
        self.follow.append(set())
        at = frozenset([len(self.chars) - 1])
        return _Automaton(False, at, at)

    def _chain(self, parts: Iterable[_Automaton]) -> _Automaton:
        return reduce(self.then, parts, _NOTHING)

    def _either(self, a: _Automaton, b: _Automaton) -> _Automaton:
        self._look(a.first, b.first)
        return _Automaton(a.is_empty or b.is_empty, a.first | b.first, a.last | b.last)

    def _many(self, node: Node, least: int, most: int | None) -> _Automaton:
        n_copies = max(least, 1) if most is None else most
        parts = [self.build(node) for _ in range(n_copies)]
        parts = [p._replace(is_empty=p.is_empty or i >= least) for i, p in enumerate(parts)]
        if most is None:
            self._link(parts[-1].last, parts[-1].first)
        return self._chain(parts)

    def _link(self, ends: Iterable[int], begins: frozenset[int]) -> None:
        for end in ends:
            self._look(self.follow[end], begins)
            self.follow[end] |= begins

    def _look(self, there: Collection[int], new: frozenset[int]) -> None:
        """Notes whether a character could lead to one of `there` and one of `new`."""
        self._work.take(len(there) * len(new) + len(new))
        self.is_clear = self.is_clear and not any(
            a != b and _overlap(self.chars[a], self.chars[b]) for a in there for b in new
        )


class _TooLarge(Exception):
    """This cannot be a terminal."""


class _Work:
    """What may still be done for one grammar."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def take(self, n: int) -> None:
        """Raises `_TooLarge` when there is less than `n` left, and ever after."""
        self._left -= n
        if self._left < 0:
            raise _TooLarge


def with_terminals(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules with terminals in them, as long as each is told apart from all else."""
    refused: set[Node] = set()
    work = _Work()
    while True:
        made = {name: _split(node, refused, work) for name, node in rules.items()}
        terminals = {t.node for n in made.values() for t in parts(n, TerminalNode)}
        claims: list[tuple[int, int, Node | None]]
        claims = [(low, high, node) for node in terminals for low, high in _first(node)]
        for n in made.values():
            claims += [(low, high, None) for c in parts(n, Chars) for low, high in c.ranges]
            claims += [(ord(c), ord(c), None) for text in parts(n, Text) for c in text.text]
        clashing = _clashing(claims)
        if not clashing:
            return made
        refused |= clashing


def _clashing(claims: list[tuple[int, int, Node | None]]) -> set[Node]:
    """Of terminals that claim ranges of characters, some that share a character with another one,
    or with what is no terminal (None); none only if there are none."""
    found: set[Node] = set()
    top: tuple[int, Node | None] = (-1, None)
    for low, high, node in sorted(claims, key=lambda claim: claim[:2]):
        if low <= top[0] and node is not top[1]:
            found |= {one for one in (node, top[1]) if one is not None}
        if high > top[0]:
            top = (high, node)
    return found


def _split(node: Node, refused: set[Node], work: _Work) -> Node:
    """`node` with terminals in the place of its largest parts that may be one."""
    if node not in refused and _is_told_apart(node, work):
        return TerminalNode(node)
    if isinstance(node, Seq):
        run = _longest_run(node, refused, work)
        if run is not None:
            before = [_split(part, refused, work) for part in node.nodes[: run.start]]
            after = [_split(part, refused, work) for part in node.nodes[run.stop :]]
            return Seq((*before, TerminalNode(Seq(node.nodes[run.start : run.stop])), *after))
        return Seq(tuple(_split(part, refused, work) for part in node.nodes))
    if isinstance(node, Alternatives):
        return Alternatives(tuple(_split(part, refused, work) for part in node.nodes))
    if isinstance(node, Many):
        return Many(_split(node.node, refused, work), node.least, node.most)
    return node


def _longest_run(seq: Seq, refused: set[Node], work: _Work) -> slice | None:
    """Where the longest run of two and more nodes lies that may be a terminal, the first of
    several.

    A run grows until a character could lead to two positions: no longer one can be a terminal then.
    """
    best: slice | None = None
    for start in range(len(seq.nodes)):
        glushkov, whole = _Glushkov(work), _NOTHING
        try:
            for stop, part in enumerate(seq.nodes[start:], start + 1):
                whole = glushkov.then(whole, glushkov.build(part))
                if not glushkov.is_clear:
                    break
                n_least = 1 if best is None else best.stop - best.start
                if (
                    stop - start > n_least
                    and glushkov.is_told_apart(whole)
                    and Seq(seq.nodes[start:stop]) not in refused
                ):
                    best = slice(start, stop)
        except _TooLarge:
            continue
    return best


def _is_told_apart(node: Node, work: _Work) -> bool:
    if isinstance(node, Chars | Ref | Token):
        return False
    glushkov = _Glushkov(work)
    try:
        whole = glushkov.build(node)
    except _TooLarge:
        return False
    return glushkov.is_told_apart(whole)


def _first(node: Node) -> Iterator[tuple[int, int]]:
    """The characters that a text of `node` begins with."""
    glushkov = _Glushkov(_Work())
    whole = glushkov.build(node)
    return (r for place in whole.first for r in glushkov.chars[place])


def _overlap(a: Ranges, b: Ranges) -> bool:
    return any(x[0] <= y[1] and y[0] <= x[1] for x in a for y in b)


def parts(node: Node, kind: type[_Kind]) -> list[_Kind]:
    """The parts of `node` that are a `kind`; what is inside of a terminal is none."""
    if isinstance(node, kind):
        return [node]
    if isinstance(node, Seq | Alternatives):
        return [part for inner in node.nodes for part in parts(inner, kind)]
    return parts(node.node, kind) if isinstance(node, Many) else []
