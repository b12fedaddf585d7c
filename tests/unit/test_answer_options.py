"""Options of the command line that say what an answer must look like."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gguf_mtp.answers.prepare import AnswerOptions
from gguf_mtp.answers.structured_output import format_grammar
from gguf_mtp.cli.answer_options import AnswerArgs, SessionWithOptions
from gguf_mtp.errors import RequestError
from tests.support.words import END, grammars

SESSION: Any = SimpleNamespace(grammars=grammars())


def takes(args: AnswerArgs, text: str) -> bool:
    form = args.options(SESSION).format
    assert form
    follower = format_grammar(SESSION.grammars, form).follow()
    follower.commit(list(text.encode()))
    return follower.failure is None and bool(follower.allowed(())[END])


def test_the_three_ways(tmp_path: Path) -> None:
    gbnf = tmp_path / "x.gbnf"
    gbnf.write_text('root ::= "ä"', encoding="utf-8")
    assert takes(AnswerArgs(grammar='root ::= "a"'), "a")
    assert takes(AnswerArgs(grammar='%llguidance {}\nstart: "a" "b"'), "ab")
    assert takes(AnswerArgs(grammar_file=gbnf), "ä")
    assert takes(AnswerArgs(json_schema='{"enum": [1]}'), "1")
    assert not takes(AnswerArgs(json_schema='{"enum": [1]}'), "2")
    assert AnswerArgs().options(SESSION, 3) == AnswerOptions(n_logprobs=3)
    assert AnswerArgs(json_schema="{}").options(SESSION, 3).n_logprobs == 3


def test_what_is_wrong_names_the_option(tmp_path: Path) -> None:
    missing, binary = tmp_path / "none", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for args, words in [
        (AnswerArgs(json_schema="{"), "--json-schema: it is not valid JSON: "),
        (AnswerArgs(json_schema="[" * 5000), "--json-schema: it is not valid JSON: "),
        (AnswerArgs(json_schema='{"items": {"type": 5}}'), "--json-schema: at /items: "),
        (AnswerArgs(grammar="root ::= x"), "--grammar: line 1, column 10: "),
        (AnswerArgs(grammar_file=missing), f"cannot read {missing}: No such file"),
        (AnswerArgs(grammar_file=binary), f"cannot read {binary}: it is not UTF-8"),
        (
            AnswerArgs(grammar="x", json_schema="{}"),
            "--grammar and --json-schema cannot be combined",
        ),
    ]:
        with pytest.raises(RequestError) as caught:
            args.options(SESSION)
        assert str(caught.value).startswith(words)
        assert "\n" not in str(caught.value)


def test_the_same_for_a_server() -> None:
    assert AnswerArgs().fields() == {}
    assert AnswerArgs(grammar="root ::= x").fields() == {"grammar": "root ::= x"}
    schema = {"name": "answer", "schema": {"type": "null"}, "strict": True}
    assert AnswerArgs(json_schema='{"type": "null"}').fields() == {
        "response_format": {"type": "json_schema", "json_schema": schema}
    }
    with pytest.raises(RequestError, match="not valid JSON"):
        AnswerArgs(json_schema="{").fields()


def test_every_answer_of_a_chat_has_the_options() -> None:
    asked: list[Any] = []

    def chat(*given: Any, options: AnswerOptions) -> None:
        asked.append((given, options))

    session: Any = SimpleNamespace(chat=chat, engine="engine")
    options = AnswerOptions(n_logprobs=2)
    bound = SessionWithOptions(session, options)
    bound.chat([{"role": "user", "content": "x"}], None, 5)
    assert asked == [(([{"role": "user", "content": "x"}], None, 5), options)]
    assert bound.engine == "engine"
