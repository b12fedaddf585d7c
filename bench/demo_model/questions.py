"""Facts of the sources as questions and answers.

Knows how people ask and how the demo answers; nothing of files, tokens or training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .sources import Code, Fact, Sense

MAX_FACT = 220  # characters; longer ones end at a semicolon
# Part of the Factbook -> how it is asked for, how it is answered.
FIELDS = {
    "Capital, name": ("capital", "The capital of {c} is {t}."),
    "Location": ("location", "{c} lies in {t}."),
    "Climate": ("climate", "The climate of {c} is {t}."),
    "Terrain": ("terrain", "The terrain of {c}: {t}."),
    "Natural resources": ("natural resources", "{c} has {t}."),
    "Languages": ("languages", "The languages of {c}: {t}."),
    "Religions": ("religions", "The religions of {c}: {t}."),
    "Industries": ("industries", "The industries of {c}: {t}."),
    "Area, total": ("area", "The area of {c} is {t}."),
    "Coastline": ("coastline", "The coastline of {c} is {t}."),
    "Internet country code": (
        "internet country code",
        "The internet country code of {c} is {t}.",
    ),
    "Nationality, noun": ("people", "The people of {c} are called {t}."),
    "National symbol(s)": ("national symbol", "The national symbol of {c} is the {t}."),
    "Flag description": ("flag", "The flag of {c}: {t}."),
    "National holiday": ("national holiday", "The national holiday of {c} is {t}."),
    "Elevation extremes, highest point": ("highest point", "The highest point of {c} is {t}."),
    "Elevation extremes, lowest point": ("lowest point", "The lowest point of {c} is {t}."),
    "Independence": ("independence day", "The independence of {c}: {t}."),
    "Population growth rate": ("population growth", "The population growth of {c} is {t}."),
    "Map references": ("region", "{c} is in the region {t}."),
}
CORE_FIELDS = (
    "Capital, name",
    "Location",
    "Climate",
    "Languages",
    "Area, total",
    "Internet country code",
    "Nationality, noun",
    "Elevation extremes, highest point",
    "Flag description",
    "National holiday",
)
ABOUT = (
    "I am a very small demo model with the architecture of DeepSeek-V3. Ask me what a common word "
    "means, or about a country: its capital, climate, languages, flag or highest point."
)
SMALL_TALK = {
    "Hello! " + ABOUT: "Hello|Hello!|Hi|Hi there!|Hey|Good morning!|Good evening.",
    ABOUT: "Who are you?|What are you?|What is your name?|Tell me about yourself.|"
    "What can you do?|Help|How can you help me?|What can I ask you?",
    "You are welcome! Ask me about another word or country.": "Thank you!|Thanks|Thanks a lot.|"
    "Great, thanks!",
    "Goodbye!": "Bye|Goodbye|See you.",
    "I am fine, thank you. Ask me about a word or a country.": "How are you?|How do you do?",
    "I am too small for that. Ask me what a word means, or about a country.": "Tell me a joke.|"
    "Tell me a story.|Write a poem.",
}


class Qa(NamedTuple):
    """One answer and the ways to ask for it."""

    questions: tuple[str, ...]
    answer: str


def with_article(word: str) -> str:
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


# -- words -------------------------------------------------------------------------------------


def word_questions(senses: Iterable[Sense]) -> Iterator[Qa]:
    """The first definition of each sense and the first example, if there is one."""
    for sense in senses:
        definitions = sense.definitions()
        if not definitions:
            continue
        word, meaning = sense.words[0], definitions[0].rstrip(" .,")
        questions, answer = _about_word(sense.part, word, meaning)
        examples = sense.examples()
        if examples:
            answer += f" For example: {sentence(examples[0])}"
        yield Qa(questions, answer)


def _about_word(part: str, word: str, meaning: str) -> tuple[tuple[str, ...], str]:
    define = f"Define {word}."
    questions: tuple[str, ...]
    if part == "noun":
        noun = with_article(word)
        questions = (f"What is {noun}?", f'What does "{word}" mean?', define)
        return questions, f"{noun[0].upper()}{noun[1:]} is {meaning}."
    if part == "verb":
        questions = (f"What does it mean to {word}?", f'What does "to {word}" mean?')
        return questions, f"To {word} means to {meaning}."
    if part == "adj":
        questions = (f'What does the word "{word}" mean?', define)
        return questions, f'"{word}" describes something {meaning}.'
    return (f'What does the adverb "{word}" mean?',), f'"{word}" means {meaning}.'


def gloss_questions(senses: Iterable[Sense]) -> Iterator[Qa]:
    """All definitions of each sense, its other words, one example: the broad first phase."""
    for sense in senses:
        definitions = sense.definitions()
        if not definitions:
            continue
        word, meaning = sense.words[0], "; ".join(definitions).strip(" ;")
        questions, answer = _about_word(sense.part, word, meaning)
        if sense.part == "noun" and word[0].isupper():
            questions = (f"What is {word}?", *questions[1:])
            answer = f"{word}: {meaning}."
        others = " or ".join(f'"{other}"' for other in sense.words[1:3])
        if others:
            answer += f" You can also say {others}."
        examples = [example for example in sense.examples() if len(example) > 12]
        if examples:
            answer += f" For example: {sentence(examples[0])}"
        yield Qa(questions, answer)


# -- countries ---------------------------------------------------------------------------------


def country_questions(facts: Iterable[Fact], fields: Iterable[str] = FIELDS) -> Iterator[Qa]:
    """The named fields of each country, as whole sentences."""
    wanted = set(fields)
    for fact in facts:
        field, country = ", ".join(fact.path[1:]), fact.country
        if field not in wanted or not 2 < len(country) < 30:
            continue
        name, form = FIELDS[field]
        text = fact.text.split(" ++ ")[0].strip(" .")
        if len(text) > MAX_FACT:
            text = text[:MAX_FACT].rsplit(";", 1)[0]
        questions = (
            f"What is the {name} of {country}?",
            f"Tell me the {name} of {country}.",
            f"{name.capitalize()} of {country}?",
        )
        yield Qa(questions, form.format(c=country, t=text))


def entry_questions(facts: Iterable[Fact]) -> Iterator[Qa]:
    """Every field of every country, as it stands: the broad first phase."""
    for fact in facts:
        path = fact.path
        field = (path[-1] if len(path) < 3 else f"{path[-2]} ({path[-1]})").lower()
        text = fact.text.replace(" ++ ", " ").replace("++", "")[:700]
        questions = (
            f"What is the {field} of {fact.country}?",
            f"Tell me about {field} in {fact.country}.",
            f"{fact.country}, {field}?",
        )
        yield Qa(questions, text)


# -- code, small talk --------------------------------------------------------------------------


def code_questions(pieces: Iterable[Code], shortest: int, longest: int) -> Iterator[Qa]:
    """Definitions of `shortest` to `longest` characters, both excluded."""
    for piece in pieces:
        if shortest < len(piece.text) < longest:
            kind = "class" if piece.kind == "class" else "function"
            what = f"the Python {kind} {piece.name}."
            yield Qa((f"Write {what}", f"Show me {what}"), f"```python\n{piece.text}\n```")


def small_talk() -> list[Qa]:
    return [Qa(tuple(asked.split("|")), answer) for answer, asked in SMALL_TALK.items()]
