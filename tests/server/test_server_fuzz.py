"""Whatever a client sends, the server answers in OpenAI's shape and goes on."""

from __future__ import annotations

import http.client
import json
import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.chat_formats import V31
from tests.support.scripted import Answer, ScriptedEngine
from tests.support.serving import Server, served_of, serving

pytestmark = pytest.mark.server

JSON_TYPE = {"Content-Type": "application/json"}
FIELDS = re.findall(
    r"\w+",
    "messages prompt max_tokens max_completion_tokens temperature top_p top_k min_p n stop seed "
    "stream stream_options tools tool_choice parallel_tool_calls chat_template_kwargs draft "
    "draft_max return_token_ids presence_penalty frequency_penalty repeat_penalty repeat_last_n "
    "typical_p samplers logit_bias ignore_eos min_tokens stop_token_ids logprobs top_logprobs "
    "response_format json_schema grammar guided_json guided_regex guided_choice structured_outputs "
    "model content tokens add_special unknown",
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.sampled_from([10**30, -(10**30), 1e308, "", "auto", "none", "required", "\x00", "\ud800"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": LEAVES}
)
CALLS = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": LEAVES}, optional={"arguments": LEAVES})},
    optional={"id": LEAVES, "type": st.just("function")},
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES},
        optional={
            "content": LEAVES | st.lists(PARTS, max_size=2),
            "tool_calls": LEAVES | st.lists(CALLS, max_size=2),
            "tool_call_id": LEAVES,
            "name": LEAVES,
        },
    ),
    max_size=3,
)
KEYS = ["type", "function", "name", "role", "schema", "json", "properties", "anyOf", "$ref", "a"]
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)
CHATS = st.tuples(BODIES, MESSAGES | JSON).map(lambda pair: pair[0] | {"messages": pair[1]})
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = ScriptedEngine(lambda *_: Answer("fine"), n_seq=4)
    with serving(engine, served_of(engine, V31)) as running:
        yield running
        assert running.client.get("/health").json() == {"status": "ok", "unfinished": 0}


def check(server: Server, path: str, body: object) -> None:
    content = json.dumps(body)  # a lone surrogate is an escape, as from other languages' clients
    response = server.client.post(path, content=content, headers=JSON_TYPE)
    if response.status_code == 200:
        assert response.content
    else:
        assert response.status_code in (400, 413), (response.status_code, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]


@SETTINGS
@given(body=CHATS)
def test_chat(server: Server, body: dict) -> None:
    check(server, "/v1/chat/completions", body)


@SETTINGS
@given(path=st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]), body=BODIES | JSON)
def test_the_other_endpoints(server: Server, path: str, body: object) -> None:
    check(server, path, body)


WHOLE = json.dumps(
    {
        "messages": [{"role": "user", "content": "Hi é🐻"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "stream": True,
        "return_token_sources": True,
    }
).encode()
SPLICES = [
    *(b"null", b"NaN", b"1e999", b"-1", b"true", b"9" * 400, b"", b'"', b"}", b"/*"),
    *(b"[" * 500, b'{"a":' * 500, b'"messages":', b"\r\n\r\n"),
    *(b"\x00", b"\xff\xfe", b"\\ud800", b"\xf0\x9f"),
]


def garbage(rng: random.Random) -> bytes:
    """Noise, or a good body with some of it lost, doubled, flipped or replaced."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    body = bytearray(WHOLE)
    for _ in range(rng.choice((1, 1, 1, 4))):
        start = rng.randrange(len(body) + 1)
        end = min(start + rng.choice((1, 2, 20)), len(body))
        match rng.randrange(4):
            case 0:
                del body[start:end]
            case 1:
                body[start:start] = body[start:end]
            case 2:
                body[start:end] = rng.choice(SPLICES)
            case _:
                body[start:end] = bytes(b ^ (1 << rng.randrange(8)) for b in body[start:end])
    return bytes(body)


@pytest.mark.slow
def test_ten_thousand_garbage_bodies(server: Server) -> None:
    """Every one gets an answer, on connections that stay usable; none is a fault of the server."""
    rng = random.Random(0)
    statuses: dict[int, int] = {}
    port = server.client.base_url.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for _ in range(10_000):
        path = rng.choice(["/v1/chat/completions"] * 3 + ["/v1/completions", "/tokenize"])
        connection.request("POST", path, garbage(rng), JSON_TYPE)
        response = connection.getresponse()
        content = response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        if response.status != 200:
            assert json.loads(content)["error"]["message"]
    connection.close()
    assert statuses.keys() == {200, 400}
    assert min(statuses.values()) > 400, (
        statuses
    )  # both the harmless and the broken were among them
    assert server.client.get("/health").json() == {"status": "ok", "unfinished": 0}
