"""Where the special tokens of a vocabulary stand in a text.

llama.cpp looks for every special token in every piece that the others have left, which takes
minutes for a text of nothing but markers; here one expression finds them all in one go. The result
is that of `llama_vocab::impl::tokenizer_st_partition` (`src/llama-vocab.cpp`): of tokens that
overlap the longest is taken, then the first of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

__all__ = ["SpecialToken", "SpecialTokens"]

_SPACE = " \t\n\v\f\r"  # of C's isspace


class SpecialToken(NamedTuple):
    """`is_control`: read only where special tokens are asked for; others are read in any text.
    `strips_left`, `strips_right`: white space on that side belongs to it."""

    id: int
    text: str
    is_control: bool
    strips_left: bool = False
    strips_right: bool = False


class SpecialTokens:
    """`tokens` in any order; those without a text are left out."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}

    def split(self, text: str, with_control: bool) -> list[int | str]:
        """Ids of special tokens, and the texts between them, none of which is empty."""
        pattern = self._all if with_control else self._others
        if pattern is None:
            return [text] if text else []
        parts: list[int | str] = []
        end, before = 0, None
        found = [(match.start(), match[1]) for match in pattern.finditer(text)]
        for start, marker in self._without_overlaps(found, with_control):
            token = self._by_text[marker]
            self._add(parts, text[end:start], before, token)
            parts.append(token.id)
            end, before = start + len(marker), token
        self._add(parts, text[end:], before, None)
        return parts

    def guarded(self, text: str, guard: str, but: Sequence[str] = ()) -> str:
        """`text` with `guard` inside of every control token's marker, so that it is none. Those in
        `but` stay."""
        if self._control is None:
            return text

        parts, end = [], 0
        for match in self._control.finditer(text):
            if match[1] not in but:  # others may overlap it: each is broken behind its first letter
                parts += [text[end : match.start() + 1], guard]
                end = match.start() + 1
        return "".join([*parts, text[end:]])

    def _without_overlaps(
        self, found: list[tuple[int, str]], with_control: bool
    ) -> list[tuple[int, str]]:
        """The longest marker at each place where one begins -> those that are taken."""
        taken: list[tuple[int, str]] = []
        cluster: list[tuple[int, str]] = []
        end = 0
        for at, text in found:
            if at >= end:
                taken += self._settled(cluster, with_control)
                cluster = []
            cluster.append((at, text))
            end = max(end, at + len(text))
        return taken + self._settled(cluster, with_control)

    def _settled(self, cluster: list[tuple[int, str]], with_control: bool) -> list[tuple[int, str]]:
        """Of markers each of which overlaps another."""
        if len(cluster) < 2:
            return cluster
        texts = {text for _, text in cluster}
        if len(texts) == 1 or self._is_run(cluster):
            return _one_after_another(cluster)
        shorter = [(at, text) for at, longest in cluster for text in self._begin(longest)]
        taken: dict[int, str] = {}
        covered: set[int] = set()
        for at, text in sorted(cluster + shorter, key=lambda f: (-len(f[1]), f[0])):
            span = range(at, at + len(text))
            is_read = with_control or not self._by_text[text].is_control
            if is_read and covered.isdisjoint(span):
                taken[at] = text
                covered.update(span)
        return sorted(taken.items())

    @staticmethod
    def _is_run(cluster: list[tuple[int, str]]) -> bool:
        """Whether they are of one letter, as runs of spaces or line breaks are: then each place
        begins with the longest there is, and going on behind it takes the same."""
        letter = cluster[0][1][0]
        return all(text.count(letter) == len(text) for _, text in cluster)

    def _begin(self, text: str) -> Iterator[str]:
        """Shorter markers that `text` begins with."""
        return (text[:n] for n in range(1, len(text)) if text[:n] in self._by_text)

    @staticmethod
    def _add(
        parts: list[int | str], text: str, left: SpecialToken | None, right: SpecialToken | None
    ) -> None:
        if left is not None and left.strips_right:
            text = text.lstrip(_SPACE)
        if right is not None and right.strips_left:
            text = text.rstrip(_SPACE)
        if text:
            parts.append(text)

    @cached_property
    def _all(self) -> re.Pattern[str] | None:
        return _pattern(list(self._by_text))

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        return _pattern([token.text for token in self._by_text.values() if token.is_control])

    @cached_property
    def _others(self) -> re.Pattern[str] | None:
        return _pattern([token.text for token in self._by_text.values() if not token.is_control])


Tree = dict[str, "Tree"]


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Matches before each of `texts`, the longest of which is the group; as a tree, so that a
    thousand markers take no longer than one."""
    tree: Tree = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}  # a text ends here
    return re.compile(f"(?=({_expression(tree)}))") if tree else None


def _expression(node: Tree) -> str:
    """What may follow at a node; where a text ends there, the longer one is tried first."""
    text = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        text += re.escape(letter)
    branches = [re.escape(letter) + _expression(rest) for letter, rest in node.items() if letter]
    if not branches:
        return text
    return f"{text}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _one_after_another(cluster: list[tuple[int, str]]) -> list[tuple[int, str]]:
    taken, end = [], 0
    for at, text in cluster:
        if at >= end:
            taken.append((at, text))
            end = at + len(text)
    return taken
