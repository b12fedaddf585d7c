"""Clients that come, leave and err at random, on the demo model: nobody gets another's text."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.processes import process

pytestmark = [pytest.mark.native, pytest.mark.slow]

COUNTRIES = ["France", "Japan", "Italy", "Spain", "Germany", "China", "Egypt", "Peru"]


def ask(country: str) -> dict:
    content = f"What is the capital of {country}?"
    return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 24}


def visit(url: str, seed: int, alone: dict[str, str]) -> int:
    """One client's random day; how many answers it read to the end."""
    rng = random.Random(seed)
    n_whole = 0
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        for _ in range(25):
            country = rng.choice(COUNTRIES)
            match rng.choice(["whole", "stream", "leave", "timeout", "wrong"]):
                case "whole":
                    answer = create(**ask(country), extra_body={"draft_max": rng.randint(0, 2)})
                    assert answer.choices[0].message.content == alone[country]
                    n_whole += 1
                case "stream":
                    chunks = list(create(**ask(country), stream=True))
                    text = "".join(c.choices[0].delta.content or "" for c in chunks)
                    assert text == alone[country]
                    n_whole += 1
                case "leave":
                    with create(**ask(country) | {"n": 2}, stream=True) as stream:
                        for _, _ in zip(range(rng.randint(0, 4)), stream, strict=False):
                            pass
                case "timeout":
                    with pytest.raises(openai.APITimeoutError):
                        create(**ask(country) | {"max_tokens": 900, "n": 4}, timeout=0.01)
                case "wrong":
                    with pytest.raises(openai.BadRequestError):
                        create(**ask(country), temperature=-1)
    return n_whole


def test_a_day_of_many_clients() -> None:
    options = ("--strict", "--draft-min", "2", "--draft-max", "2", "--temp", "0")
    with process(*options, "--parallel", "3", "--queue", "200") as running:
        with OpenAI(base_url=running.url, api_key="none") as client:
            alone = {
                country: client.chat.completions.create(**ask(country)).choices[0].message.content
                for country in COUNTRIES
            }
        with ThreadPoolExecutor(8) as pool:
            days = [pool.submit(visit, running.url, seed, alone) for seed in range(8)]
            assert sum(day.result() for day in days) > 40
        base = running.url.removesuffix("/v1")
        end = time.monotonic() + 30
        while httpx.get(f"{base}/health", trust_env=False).json()["unfinished"]:
            assert time.monotonic() < end, "requests of clients that left are still running"
            time.sleep(0.05)
        assert running.stop() == ""
        assert running.process.returncode == 0
