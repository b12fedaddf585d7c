"""Text to tokens, with what was tokenised before.

llama.cpp's tokenizer builds its expressions anew for every piece of text between special tokens: 2
to 5 ms each with DeepSeek's, which is most of the time a long chat takes before its first token. So
pieces are remembered, and those that are new are tokenised many at once where that is safe. The ids
are llama.cpp's own, whatever way they came.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple
from unicodedata import category

from gguf_mtp.errors import ContextFull
from gguf_mtp.llama.special_tokens import SpecialTokens

__all__ = ["Tokenizer", "Words"]

Ids = tuple[int, ...]
N_KEPT, MOST_KEPT = 1 << 16, 1 << 23
"""Pieces that are remembered, and the characters of all of them together."""
_TOGETHER = 1_800
"""Characters that are tokenised at once; more need a deeper stack than a thread has."""

WALLED = frozenset({"deepseek-v3", "hunyuan-dense", "joyai-llm"})
"""Pre-tokenizers that cut a text at every digit and at every run of Chinese letters before anything
else (`LLAMA_VOCAB_PRE_TYPE_DEEPSEEK3_LLM`): what stands on both sides of such a wall is tokenised
as if it stood alone."""
_HAN, _DIGITS = "一丁七万丈三", "73142690"


class Words(NamedTuple):
    """What of a vocabulary the tokenizer needs. `tokenize` is llama.cpp's, of a text alone without
    its special tokens parsed; `head` and `tail` are put around a text where that is asked for;
    `pre` names the pre-tokenizer, `longest` counts the bytes of the longest token."""

    tokenize: Callable[[str], Sequence[int]]
    special: SpecialTokens
    head: Ids
    tail: Ids
    pre: str
    longest: Callable[[], int]


class Tokenizer:
    """Tokenises as llama.cpp does. May be used by several threads."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._walls = [] if words.pre not in WALLED else _walls(words.tokenize)
        self._known: OrderedDict[str, Ids] = OrderedDict()  # the newest last
        self._n_chars = 0
        self._lock = threading.Lock()

    def tokenize(
        self,
        text: str,
        add_special: bool,
        parse_special: bool,
        guard: str = "",
        most: int | None = None,
    ) -> list[int]:
        """See `Vocab.tokenize` and `Vocab.prompt_tokens`."""
        parts = self._words.special.split(text, parse_special)
        if guard:
            plain = (p if isinstance(p, int) else p.replace(guard, "") for p in parts)
            parts = [part for part in plain if part != ""]
        if most is not None:
            self._refuse_more_than(most, parts)
        ids = self._ids([part for part in parts if isinstance(part, str)])
        tokens = list(self._words.head) if add_special else []
        for part in parts:
            tokens.extend((part,) if isinstance(part, int) else ids[part])
        return [*tokens, *self._words.tail] if add_special else tokens

    def _refuse_more_than(self, most: int, parts: Sequence[int | str]) -> None:
        """Raises `ContextFull` for parts that cannot be as few as `most` tokens."""
        n_bytes = sum(len(p.encode(errors="replace")) for p in parts if isinstance(p, str))
        n_least = len(parts)
        if n_least <= most and n_bytes > most:  # a token of one byte each would be too many
            n_least = max(n_least, -(-n_bytes // self._words.longest()))
        if n_least > most:
            raise ContextFull(n_least, most, is_least=True)

    def _ids(self, pieces: Sequence[str]) -> dict[str, Ids]:
        found: dict[str, Ids] = {}
        with self._lock:
            for piece in pieces:
                if piece in self._known:
                    self._known.move_to_end(piece)
                    found[piece] = self._known[piece]
        new = dict.fromkeys(piece for piece in pieces if piece not in found)
        for group in self._groups(list(new)):
            found |= self._together(group)
        with self._lock:
            for piece in new:
                self._remember(piece, found[piece])
        return found

    def _remember(self, piece: str, ids: Ids) -> None:
        if piece not in self._known:
            self._n_chars += len(piece)
        self._known[piece] = ids
        while len(self._known) > N_KEPT or self._n_chars > MOST_KEPT:
            oldest, _ = self._known.popitem(last=False)
            self._n_chars -= len(oldest)

    def _groups(self, pieces: Sequence[str]) -> list[list[str]]:
        """Pieces that are tokenised at once, with one kind of wall between them."""
        if not self._walls:
            return [[piece] for piece in pieces]
        groups: list[list[str]] = []
        by_kind: dict[_Kind, list[str]] = {}
        for piece in pieces:
            by_kind.setdefault(_kind(piece), []).append(piece)
        for kind, alike in by_kind.items():
            size = _TOGETHER
            for piece in alike:
                size += len(piece) + 1
                if size > _TOGETHER or kind == "none":
                    groups.append([])
                    size = len(piece)
                groups[-1].append(piece)
        return groups

    def _together(self, pieces: Sequence[str]) -> dict[str, Ids]:
        """The ids of pieces of one group."""
        if len(pieces) == 1:
            return {pieces[0]: tuple(self._words.tokenize(pieces[0]))}
        text, kind = "".join(pieces), _kind(pieces[0])
        free = (w for w in self._walls if w.kind == kind and w.letter not in text)
        wall = next(free, None)
        if wall is None:
            half = len(pieces) // 2
            return self._together(pieces[:half]) | self._together(pieces[half:])
        ids = tuple(self._words.tokenize(wall.letter.join(pieces)))
        found, begin = {}, 0
        for piece in pieces[:-1]:
            end = wall.find(ids, begin)
            found[piece] = ids[begin:end]
            begin = end + len(wall.ids)
        return found | {pieces[-1]: ids[begin:]}


_Kind = Literal["han", "digit", "none"]


class _Wall(NamedTuple):
    """A letter that its pre-tokenizer cuts off from its neighbours, and its tokens."""

    kind: _Kind
    letter: str
    ids: Ids

    def find(self, ids: Ids, begin: int) -> int:
        """Where it is: no text without its letter has all of its tokens in a row."""
        while True:
            begin = ids.index(self.ids[0], begin)
            if ids[begin : begin + len(self.ids)] == self.ids:
                return begin
            begin += 1


def _kind(piece: str) -> _Kind:
    """The walls that can stand on both sides of a piece: what is like them would be joined."""
    ends = piece[0], piece[-1]
    if not any(_is_han(letter) for letter in ends):
        return "han"
    # Letters that this Python does not know may be digits for llama.cpp.
    return "none" if any(category(letter)[0] in "NC" for letter in ends) else "digit"


def _is_han(letter: str) -> bool:
    return "\u4e00" <= letter <= "\u9fa5" or "\u3040" <= letter <= "\u30ff"


def _walls(tokenize: Callable[[str], Sequence[int]]) -> list[_Wall]:
    kinds: dict[_Kind, str] = {"han": _HAN, "digit": _DIGITS}
    walls = [
        _Wall(kind, letter, tuple(tokenize(letter)))
        for kind, letters in kinds.items()
        for letter in letters
    ]
    return [wall for wall in walls if wall.ids]  # of a vocabulary without its bytes there are none
