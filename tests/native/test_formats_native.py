"""DeepSeek's chat formats in the tokens of a real vocabulary, where markers are control tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gguf_mtp.demo import demo_model
from gguf_mtp.loading.loader import LoadOptions, load
from gguf_mtp.session import Session
from tests.server.test_server_formats import TOOLS, V3_TEXT, V31_TEXT, put_together
from tests.support.chat_formats import R1, V3, V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import served_by, serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with load(demo_model(), LoadOptions(n_ctx=256, draft="off")) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("template", "text"), [(V3, V3_TEXT), (R1, f"Hm.</think>{V3_TEXT}"), (V31, V31_TEXT)]
)
def test_calls_in_real_tokens(session: Session, template: str, text: str) -> None:
    vocab = session.vocab
    ids = vocab.tokenize(text, add_special=False)
    begin = vocab.tokenize("<｜tool▁calls▁begin｜>", add_special=False)
    assert len(begin) == 1
    assert vocab.piece(begin[0]) == b""  # a control token: its text is nowhere but here
    engine = ScriptedEngine(lambda *_: Answer(ids, chunk=2), show=lambda _: "")
    with serving(engine, served_by(session, template, engine.limits)) as server:
        whole = server.answer(tools=TOOLS)["choices"][0]
        message, finish = put_together(server.events(tools=TOOLS))
        raw = server.answer()["choices"][0]["message"]["content"]
    assert whole["finish_reason"] == finish == "tool_calls"
    assert whole["message"]["content"] == message["content"] == "I look."
    for calls in (whole["message"]["tool_calls"], message["tool_calls"]):
        assert [c["function"]["name"] for c in calls] == ["weather", "time"]
        assert calls[0]["function"]["arguments"] == '{"city": "Paris", "unit": "°C"}'
    assert "▁" not in raw  # nobody asked for calls: control tokens have no text
    bos, user = (vocab.tokenize(m, add_special=False) for m in (vocab.bos, "<｜User｜>"))
    for request in engine.requests:
        assert (request.prompt.count(bos[0]), request.prompt.count(user[0])) == (1, 1)
