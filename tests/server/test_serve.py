"""`gguf-mtp serve` as a user starts it: a real process, the demo model, OpenAI's client."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from gguf_mtp.cli.http_server import end_engine, listen
from gguf_mtp.cli.serve import exposure
from gguf_mtp.errors import GgufMtpError
from tests.support.processes import COMMAND, Process, process

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


# -- before anything is loaded -------------------------------------------------------------------


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(GgufMtpError) as refusal:
            listen("127.0.0.1", port)
    assert str(refusal.value) == (f"127.0.0.1 port {port} is in use; choose another with --port")
    with listen("127.0.0.1", port):
        """Free again at once."""


@pytest.mark.parametrize("host", ["256.0.0.1", "no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_cannot_be_listened_on_is_one_sentence(host: str) -> None:
    with pytest.raises(GgufMtpError, match=f"^cannot listen on {host} port 0: .") as refusal:
        listen(host, 0)
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_loopback() -> None:
    try:
        with listen("::1", 0) as listener:
            assert listener.family == socket.AF_INET6
    except GgufMtpError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_warning(host: str) -> None:
    assert exposure(host, None) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.example"])
def test_other_addresses_do_without_a_key(host: str) -> None:
    assert exposure(host, "key") is None
    assert "--api-key" in (exposure(host, None) or "")


class Stuck:
    """A worker whose thread is in a decode that does not end."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def stop(self, _reason: str, _timeout: float) -> bool:
        if self._error:
            raise self._error
        return False


@pytest.mark.parametrize(("error", "code"), [(None, 1), (KeyboardInterrupt(), 130)])
def test_the_model_is_not_freed_under_a_decode(error, code, monkeypatch, capsys) -> None:
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    end_engine(Stuck(error))  # type: ignore[arg-type]
    assert exits == [code]
    assert ("did not stop within 60 s" in capsys.readouterr().err) is (code == 1)


# -- the process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict() -> Iterator[Process]:
    with process("--strict", "--draft-min", "2", "--draft-max", "2", "--temp", "0") as running:
        yield running
        assert running.stop() == ""
        assert running.process.returncode == 0


@pytest.fixture
def client(strict: Process) -> Iterator[OpenAI]:
    with OpenAI(base_url=strict.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.native
def test_it_says_what_it_loaded_where_and_whether_it_drafts(strict: Process) -> None:
    model, layers, listening = strict.greeting
    assert "deepseek2" in model
    assert "drafting with its MTP block" in model
    assert re.fullmatch(r"CPU [\d.]+ MiB \(7 layers, output, experts of 6 layers\)", layers)
    page = strict.url.removesuffix("v1")
    assert listening == (
        f"listening on {strict.url}, up to 4 concurrent requests; open {page} in a browser"
    )
    assert strict.url.startswith("http://127.0.0.1:")


@pytest.mark.native
def test_whole_and_streamed_answers_are_the_models_own(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=FRANCE)
    assert whole.choices[0].message.content == PARIS
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=FRANCE, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == PARIS
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    # Everything but the last token of the prompt was read for the first request already.
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == last.usage.prompt_tokens - 1


@pytest.mark.native
@pytest.mark.parametrize("language", ["bash", "python"])
def test_the_examples_of_the_document_run(strict: Process, language: str) -> None:
    document = Path(__file__).parents[2] / "docs" / "SERVER.md"
    code, *_ = re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.S)
    code = code.replace("http://127.0.0.1:8080/v1", strict.url)
    command = ["bash", "-c"] if language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*command, code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert PARIS in done.stdout


@pytest.mark.native
def test_chat_with_the_server_is_like_chat_with_the_model(strict: Process) -> None:
    done = subprocess.run(
        [COMMAND, "chat", "--server", strict.url, "--temp", "0"],
        input="What is the capital of France?\n/stats\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{PARIS}\n")
    shown = re.sub(r"[\d.]+", "#", done.stderr).splitlines()
    assert shown[0] == "prompt  # tokens read at # tokens/s, # already in the cache"
    assert shown[1].startswith("answer  # tokens in # s, # tokens/s")


@pytest.mark.native
def test_draft_switches_change_the_speed_and_never_the_text(client: OpenAI) -> None:
    def ask(**ours) -> tuple[str, dict]:
        body = ours or None
        answer = client.chat.completions.create(model="demo", messages=FRANCE, extra_body=body)
        assert answer.model_extra is not None
        return answer.choices[0].message.content or "", answer.model_extra["timings"]

    text, drafting = ask()
    plain_text, plain = ask(draft=False)
    short_text, short = ask(draft_max=1)
    assert text == plain_text == short_text == PARIS
    assert (plain["drafted"], plain["depth"]) == (0, 0.0)
    assert 1.0 < drafting["depth"] <= 2.0
    assert 0.5 < short["depth"] <= 1.0
    assert len(short["accepted_per_position"]) == 1
    assert drafting["rounds"] < short["rounds"] < plain["rounds"]
    assert drafting["decode_tokens"] == plain["decode_tokens"]


@pytest.mark.native
def test_what_was_read_for_a_client_that_left_is_not_read_again(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about a fox and a river."}]
    stream = client.chat.completions.create(
        model="demo", messages=messages, stream=True, max_tokens=400, temperature=1
    )
    with stream:
        next(iter(stream))  # and away
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


@pytest.mark.native
def test_choices_share_one_reading_of_the_prompt(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Name three animals that live in the sea."}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, n=3, max_tokens=8, temperature=1, seed=1
    )
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage is not None
    timings = (answer.model_extra or {})["timings"]
    n_prompt = answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) < n_prompt  # of one prompt
    assert timings["cached_tokens"] >= 2 * (n_prompt - 1)
    assert timings["prefill_tokens"] < n_prompt


@pytest.mark.native
def test_clients_together_get_what_each_gets_alone(client: OpenAI) -> None:
    countries = ["France", "Japan", "Italy", "Spain", "Germany", "China"]

    def ask(country: str) -> str:
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=20)
        return answer.choices[0].message.content or ""

    alone = [ask(country) for country in countries]
    with ThreadPoolExecutor(len(countries)) as pool:
        together = list(pool.map(ask, countries))
    assert together == alone
    assert alone[0] == PARIS


@pytest.mark.native
def test_the_vocabulary_over_http(strict: Process) -> None:
    base = strict.url.removesuffix("/v1")
    with httpx.Client(base_url=base, trust_env=False) as http:
        tokens = http.post("/tokenize", json={"content": "né 🐻 <｜User｜>"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": "né 🐻 "}
        too_long = http.post("/v1/completions", json={"prompt": "word " * 5000})
        assert too_long.status_code == 400
        message = too_long.json()["error"]["message"]
        assert re.search(r"context length is 2048 tokens, but the prompt has \d{4,}", message)
        nonsense = http.post("/v1/completions", json={"prompt": [4096]})
        assert nonsense.json()["error"]["message"].startswith("there is no token 4096")


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_end(number: int) -> None:
    with (
        process("--temp", "0", "--draft", "off", "--parallel", "2", "--alias", "otter") as running,
        OpenAI(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=60, stream=True
        )
        chunks = iter(stream)
        first = next(chunks)
        running.process.send_signal(number)
        rest = list(chunks)
        assert first.model == "otter"
        assert rest[-1].choices[0].finish_reason in ("length", "stop")
        assert running.stop() == ""
        assert running.process.returncode == 0


@pytest.mark.native
def test_after_the_grace_answers_are_told_and_the_process_ends() -> None:
    with process(
        "--draft", "off", "--grace", "0.1", "-np", "1", env={"GGUF_MTP_API_KEY": "key"}
    ) as running:
        base = running.url.removesuffix("/v1")
        with httpx.Client(base_url=base, timeout=30, trust_env=False) as http:
            assert http.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer key"}
            prompts = [f"Once upon a time, {name}" for name in ("Ann", "Bob", "Eve", "Tom")]
            body = {"prompt": prompts, "max_tokens": 500, "stream": True, "n": 16}  # most wait
            url = "/v1/completions"
            with http.stream("POST", url, json=body, headers=headers) as response:
                lines = response.iter_lines()
                next(lines)
                running.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert '"message":"the server is shutting down"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert running.stop() == ""
        assert running.process.returncode == 0
