"""A model of another family, with a ChatML template, behind the same server."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.support.processes import process
from tests.support.smollm2 import download

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("smollm2"))


def test_chatml(smollm2: Path) -> None:
    with (
        process(str(smollm2), "--ctx", "1024", "--parallel", "2", "--temp", "0") as running,
        OpenAI(base_url=running.url, api_key="none", max_retries=0) as client,
    ):
        assert "drafting with copies" in running.greeting[0]
        ask = [{"role": "user", "content": "Why is the sky blue?"}]
        answer = client.chat.completions.create(model="m", messages=ask, max_tokens=40)
        assert "Rayleigh scattering" in (answer.choices[0].message.content or "")
        assert answer.usage is not None
        # What the template writes, default system message included; its BOS is <|im_start|>.
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{ask[0]['content']}"
        text += "<|im_end|>\n<|im_start|>assistant\n"
        body = {"content": text, "add_special": False}
        tokens = client.post("../tokenize", body=body, cast_to=dict[str, list[int]])["tokens"]
        assert answer.usage.prompt_tokens == len(tokens)
        assert tokens.count(tokens[0]) == 3

        chunks = list(
            client.chat.completions.create(model="m", messages=ask, max_tokens=40, stream=True)
        )
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert streamed == answer.choices[0].message.content
        tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(model="m", messages=ask, tools=[tool])
        assert "drafting by n-gram lookup only" in running.stop()
        assert running.process.returncode == 0
