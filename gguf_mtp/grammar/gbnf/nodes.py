"""What the rules of a GBNF grammar are made of."""

from __future__ import annotations

from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Characters, from and to, by number."""
LAST_CHAR = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class: as a regular expression, and as what it holds."""

    regex: str
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token, as Lark writes it."""

    lark: str


@dataclass(frozen=True, slots=True)
class Ref:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Many:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Seq:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TerminalNode:
    """A part that is a terminal of its own; the parser makes none (`terminals.py`)."""

    node: Node


Node = Chars | Text | Token | Ref | Many | Seq | Alternatives | TerminalNode
