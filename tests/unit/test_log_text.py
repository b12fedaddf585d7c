"""A request's line in the log, as a person reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.cli.log_files import open_files
from gguf_mtp.cli.log_format import LogFormat
from gguf_mtp.server.log_text import as_text

HEAD = {"time": "2026-12-01T13:12:35.892Z", "method": "POST", "path": "/v1/x", "status": 200}
ANSWER = {
    "seconds": 1.254, "id": "chatcmpl-1", "stream": True, "prompt_tokens": 120,
    "cached_tokens": 80, "answer_tokens": 64, "finish": ["stop"], "first_token_s": 0.314,
    "prefill_s": 0.3, "decode_s": 0.9, "tokens_per_s": 51.23, "rounds": 25, "drafted": 60,
    "accepted": 45,
}  # fmt: skip


def line(**more: Any) -> str:
    """Without the time, which is this machine's."""
    time, _, rest = as_text(HEAD | more).partition(" ")
    assert re.fullmatch(r"\d\d:12:35|\d\d:42:35", time)
    return rest


def test_an_answer() -> None:
    assert line(**ANSWER) == (
        "POST /v1/x 200 in 1.25 s: 120 prompt tokens (80 cached), first token after 0.31 s, 64 "
        "tokens, 51.2 tokens/s, ended by stop, accepted 45 of 60 drafted (75 %), 2.56 tokens per "
        "round"
    )


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"drafted": 0, "accepted": 0}, "ended by stop"),
        ({"drafted": 0, "finish": ["stop", "length", "stop"]}, "ended by stop and length"),
        ({"drafted": 0, "error": "boom", "finish": ["error"]}, "ended by error, error: boom"),
    ],
)
def test_what_an_answer_may_lack(more: dict[str, Any], end: str) -> None:
    assert line(**ANSWER | more).endswith(f"51.2 tokens/s, {end}")


def test_an_answer_that_never_began_and_a_refusal() -> None:
    cut = {"first_token_s": None, "answer_tokens": 0, "tokens_per_s": 0.0, "drafted": 0}
    assert line(**ANSWER | cut | {"finish": ["cancelled"]}) == (
        "POST /v1/x 200 in 1.25 s: 120 prompt tokens (80 cached), 0 tokens, ended by cancelled"
    )
    assert line(seconds=0.004, status=400, error="max_tokens: no") == (
        "POST /v1/x 400 in 0.00 s: error: max_tokens: no"
    )
    assert line(seconds=0.0) == "POST /v1/x 200 in 0.00 s"


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        (LogFormat.text, r"\d\d:\d\d:35 POST"),
        (LogFormat.json, '{"time"'),
        (LogFormat.auto, '{"time"'),
    ],
)
def test_a_file_has_the_form_that_was_asked_for(
    tmp_path: Path, form: LogFormat, begin: str
) -> None:
    """A line is a line, whatever a client was told."""
    file = tmp_path / "log"
    with open_files(str(file), None, False, form) as files:
        assert files.log
        files.log.write(HEAD | {"seconds": 0.0, "error": "one\ntwo"})
    [written] = file.read_text().splitlines()
    assert re.match(begin, written)
    assert "one" in written
