"""Training data of one phase: conversations of questions and answers, as token ids.

    python -m bench.demo_model.corpus PHASE --wordnet DIR --factbook DIR --out DIR

Writes to the output folder `PHASE.npy` (uint16 ids), and of answers that are never trained on
`PHASE_held.npy` and `PHASE_held.json`; the phase `broad`, which comes first, also `tokenizer.json`.
What the phases are for: README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import questions, sources
from .questions import Qa
from .tokenizer import ASSISTANT, BOS, EOS, USER, train_tokenizer

N_VOCAB = 4096
MAX_TURNS = 4
BATCH = 2000  # documents tokenised at a time


class Places(NamedTuple):
    """Where the sources lie, and the output folder."""

    wordnet: Path
    factbook: Path
    python: Path
    out: Path


class Material(NamedTuple):
    """`groups` are kinds of questions; `n_held[k]` answers of group k are never trained on.

    The rest is gone through `n_passes` times, each time asked and ordered otherwise, with
    `n_small_talk` rounds of small talk. `longest[k]` bounds a group's training answers.
    """

    groups: Sequence[Sequence[Qa]]
    n_held: Sequence[int]
    longest: Sequence[int | None]
    n_passes: int
    n_small_talk: int


# -- the phases --------------------------------------------------------------------------------


def broad(places: Places) -> Material:
    """All that the sources say, once: language itself, and the tokenizer's statistics."""
    library = sources.code(places.python, "**/*.py")
    groups = (
        list(questions.gloss_questions(sources.senses(places.wordnet))),
        list(questions.entry_questions(sources.facts(places.factbook))),
        list(questions.code_questions(library, 120, 2500)),
    )
    return Material(groups, (400, 400, 100), (None, None, None), n_passes=1, n_small_talk=0)


def focused(places: Places) -> Material:
    """Common words, twenty facts a country, short functions, small talk."""
    groups = (
        list(questions.word_questions(sources.common_senses(places.wordnet, min_count=2))),
        list(questions.country_questions(sources.facts(places.factbook))),
        _short_functions(places),
    )
    return Material(groups, (120, 120, 30), (None, None, None), n_passes=4, n_small_talk=12)


def core(places: Places) -> Material:
    """Very common words, ten facts a country, 100 functions: what the demo is asked about.

    What `focused` held out stays unseen.
    """
    words = sources.common_senses(places.wordnet, min_count=10)
    facts = sources.facts(places.factbook)
    groups = (
        list(questions.word_questions(words)),
        list(questions.country_questions(facts, questions.CORE_FIELDS)),
        _short_functions(places),
    )
    held = json.loads((places.out / "focused_held.json").read_text(encoding="utf-8"))
    unseen = {row["answer"] for row in held}
    seen = tuple([qa for qa in group if qa.answer not in unseen] for group in groups)
    return Material(seen, (60, 60, 15), (None, None, 100), n_passes=24, n_small_talk=12)


def _short_functions(places: Places) -> list[Qa]:
    pieces = sources.code(places.python, "*.py")
    public = (p for p in pieces if p.kind == "def" and not p.name.startswith("_"))
    return list(questions.code_questions(public, 80, 700))


PHASES: dict[str, Callable[[Places], Material]] = {"broad": broad, "focused": focused, "core": core}


# -- conversations -----------------------------------------------------------------------------


def split(material: Material, rng: random.Random) -> tuple[list[Qa], list[Qa]]:
    """Answers to train on, and answers held out."""
    training: list[Qa] = []
    held: list[Qa] = []
    for group, n_held, longest in zip(
        material.groups, material.n_held, material.longest, strict=True
    ):
        shuffled = list(group)
        rng.shuffle(shuffled)
        n_held = min(n_held, len(shuffled) // 2)  # small sources keep half for training
        apart = {qa.answer for qa in shuffled[:n_held]}
        held += shuffled[:n_held]
        training += [qa for qa in shuffled[n_held:] if qa.answer not in apart][:longest]
    return training, held


def turn(question: str, answer: str) -> str:
    return USER + question + ASSISTANT + answer + EOS


def conversations(answers: Sequence[Qa], rng: random.Random) -> Iterator[str]:
    """Each answer once, asked in one of its ways, in conversations of one to four turns."""
    turns = [turn(rng.choice(qa.questions), qa.answer) for qa in answers]
    rng.shuffle(turns)
    at = 0
    while at < len(turns):
        n = rng.randint(1, MAX_TURNS)
        yield BOS + "".join(turns[at : at + n])
        at += n


def documents(material: Material, training: Sequence[Qa], rng: random.Random) -> Iterator[str]:
    answers = [*training, *questions.small_talk() * material.n_small_talk]
    for _ in range(material.n_passes):
        yield from conversations(answers, rng)


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.uint16]:
    """Token ids of all the texts, one after the other."""
    ids: list[int] = []
    rest = iter(texts)
    while batch := list(islice(rest, BATCH)):
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            ids += encoding.ids
    return np.array(ids, dtype=np.uint16)


def build(phase: str, places: Places, n_vocab: int = N_VOCAB) -> tuple[int, int]:
    """Write the phase's files; returns the numbers of training and held-out tokens."""
    rng = random.Random(1)
    material = PHASES[phase](places)
    training, held = split(material, rng)
    texts = list(documents(material, training, rng))
    places.out.mkdir(parents=True, exist_ok=True)
    path = places.out / "tokenizer.json"
    if phase == "broad":
        train_tokenizer(texts, n_vocab).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    asked = [(rng.choice(qa.questions), qa.answer) for qa in held]
    ids, held_ids = encode(tokenizer, texts), encode(tokenizer, (BOS + turn(*row) for row in asked))
    np.save(places.out / f"{phase}.npy", ids)
    np.save(places.out / f"{phase}_held.npy", held_ids)
    rows = [{"prompt": question, "answer": answer} for question, answer in asked]
    text = json.dumps(rows, ensure_ascii=False, indent=1)
    (places.out / f"{phase}_held.json").write_text(text, encoding="utf-8")
    return len(ids), len(held_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("--wordnet", type=Path, required=True, help="folder of data.noun, ...")
    parser.add_argument("--factbook", type=Path, required=True, help="folder of africa, ...")
    parser.add_argument("--python", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    places = Places(args.wordnet, args.factbook, args.python, args.out)
    n_training, n_held = build(args.phase, places)
    print(f"{args.phase}: {n_training:,} tokens to train on, {n_held:,} held out, in {args.out}")


if __name__ == "__main__":
    main()
