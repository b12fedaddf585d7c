"""Grammars on the demo model: every answer keeps to its own, drafting or not."""

from __future__ import annotations

import codecs
import ctypes
import json
import random
from collections.abc import Iterator, Sequence

import jsonschema
import llama_cpp as L
import numpy as np
import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.grammar.gbnf.lark import to_lark
from gguf_mtp.grammar.json_schema import compile_schema
from gguf_mtp.grammar.matching import Grammar, Grammars
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.params import RequestOptions, SamplingParams
from gguf_mtp.session import Session
from tests.support.schemas import random_schema

pytestmark = pytest.mark.native

N_SCHEMAS = 200
N_SEQ = 10
PROMPT = "Describe yourself as JSON."


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    options = LoadOptions(n_ctx=768, n_seq=N_SEQ, n_threads=1, draft_min=3, draft_max=3)
    with load(demo_model(), options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def grammars(session: Session) -> Grammars:
    return grammars_of(session)


def grammars_of(session: Session) -> Grammars:
    return session.grammars


def answers(
    session: Session, wishes: Sequence[tuple[SamplingParams, Grammar]], max_tokens: int = 600
) -> tuple[list[str], list[str | None], int]:
    """Texts and finish reasons, all of `wishes` at once, and how many draft tokens were taken."""
    engine, prompt = session.engine, session.chat_tokens([{"role": "user", "content": PROMPT}])
    ids = [
        engine.submit(prompt, params, max_tokens, RequestOptions(constraint=grammar.follow()))
        for params, grammar in wishes
    ]
    tokens: dict[int, list[int]] = {id_: [] for id_ in ids}
    ends: dict[int, str | None] = {}
    n_accepted = 0
    while not engine.is_idle:
        for chunk in engine.step():
            tokens[chunk.seq] += chunk.tokens
            if chunk.stats:
                ends[chunk.seq] = chunk.finish_reason
                n_accepted += chunk.stats.accepted
    pieces = [b"".join(map(session.vocab.piece, tokens[id_])) for id_ in ids]
    return [raw.decode() for raw in pieces], [ends[id_] for id_ in ids], n_accepted


def test_answers_to_random_schemas_are_all_valid(session: Session, grammars: Grammars) -> None:
    """Hot, with drafting: by seed and without, several schemas side by side."""
    rng = random.Random(20_26)
    schemas = [random_schema(rng) for _ in range(N_SCHEMAS)]
    wishes = [
        (
            SamplingParams(temperature=1.5, top_p=1.0, min_p=0.0, seed=i if i % 2 else None),
            compile_schema(grammars, schema),
        )
        for i, schema in enumerate(schemas)
    ]
    texts, ends, n_accepted = answers(session, wishes)
    for schema, text, end in zip(schemas, texts, ends, strict=True):
        assert end == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)
    assert n_accepted > N_SCHEMAS  # it was drafted, and drafts were taken
    assert len(set(texts)) > N_SCHEMAS / 2


def test_drafting_does_not_change_a_greedy_answer() -> None:
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(8)]
    params = SamplingParams(temperature=0)
    texts, n_accepted = [], []
    for draft, n_draft in (("mtp", 3), ("off", 0)):
        options = LoadOptions(
            n_ctx=512, strict=True, draft=draft, draft_min=n_draft, draft_max=n_draft
        )
        with load(demo_model(), options) as session:
            made = grammars_of(session)
            wishes = [(params, compile_schema(made, schema)) for schema in schemas]
            found = answers(session, wishes, 120)
        texts.append(found[0])
        n_accepted.append(found[2])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3
    assert n_accepted[0] > 20
    assert n_accepted[1] == 0


# -- GBNF, against llama.cpp's own sampler -----------------------------------------------------

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a comment
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {
    "json": JSON,
    "words that begin with each other": 'root ::= ("a" | "ab" | "abc")+ "b" "."?',
    "greed": 'root ::= word "b" end\nword ::= [a-c]+\nend ::= [^x]{1,2}',
    "recursion and greed": 'root ::= item | "(" root ")" item\nitem ::= [a-z]* "th" [a-z]?',
    "unicode": 'root ::= ([日-本é] | "\\u00e4\\U0001F43B" | [^\\x00-\\x7f])+ "\\x21"',
    "nothing is something": 'root ::= "" | ("x" root "y")? | .{2}',
    "counts": 'root ::= [a-z]{2} [0-9]{0,3} "-"{2,} (" the" | "th")?',
    "sums": 'root ::= (expr "=" num "\\n")+\nexpr ::= term ([-+*/] term)*\n'
    'term ::= num | "(" expr ")"\nnum ::= [0-9]+',
}


class Sampler:
    """llama.cpp's grammar sampler over the demo's vocabulary."""

    def __init__(self, session: Session, gbnf: str) -> None:
        self._vocab = session.vocab._vocab
        self._n = session.facts.n_vocab
        self._sampler = L.llama_sampler_init_grammar(self._vocab, gbnf.encode(), b"root")
        assert self._sampler

    def allowed(self) -> set[int]:
        cells = (L.llama_token_data * self._n)()
        for i in range(self._n):
            cells[i].id = i
        array = L.llama_token_data_array(cells, self._n, -1, False)
        L.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {cells[i].id for i in range(self._n) if cells[i].logit == 0}

    def accept(self, token: int) -> None:
        L.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        L.llama_sampler_free(self._sampler)


def is_text(raw: bytes) -> bool:
    """Whether `raw` may become UTF-8: llama.cpp lets bytes through that cannot, and stops at 0."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("name", GRAMMARS)
def test_gbnf_allows_what_llama_cpp_allows(session: Session, grammars: Grammars, name: str) -> None:
    rng = random.Random(name)
    grammar = grammars.compile(to_lark(GRAMMARS[name], grammars.token))
    ends, piece = session.engine.limits.end_tokens, session.vocab.piece
    n_rows = 0
    while n_rows < 60:
        sampler, follower, text = Sampler(session, GRAMMARS[name]), grammar.follow(), b""
        for _ in range(20):
            theirs = {t for t in sampler.allowed() if is_text(text + piece(t))}
            theirs -= {t for t in theirs - ends if not piece(t)}  # control tokens, at the end
            ours = {int(i) for i in np.flatnonzero(follower.allowed(()))}
            assert {t for t in ours if b"\0" not in piece(t)} == theirs
            n_rows += 1
            tokens = sorted(ours - ends)
            if not tokens or (ends & ours and rng.random() < 0.2):
                break
            token = rng.choice(tokens)
            sampler.accept(token)
            follower.commit([token])
            text += piece(token)
        sampler.close()
