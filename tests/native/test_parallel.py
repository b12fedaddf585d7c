"""Several sequences on the demo model: each as it is alone, and one pass a round for all."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import random
from pathlib import Path

import llama_cpp
import pytest

import gguf_mtp
from gguf_mtp.demo import demo_model
from gguf_mtp.engine.engine import Engine
from gguf_mtp.loading.loader import LoadOptions
from gguf_mtp.params import SamplingParams
from gguf_mtp.session import Session
from gguf_mtp.stats import Stats

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
QUESTIONS = json.loads(Path("bench/prompts/held_out.json").read_text(encoding="utf-8"))
STRICT = LoadOptions(n_ctx=331, draft_min=2, draft_max=2, strict=True)  # an odd context size


def load(options: LoadOptions) -> Session:
    return gguf_mtp.load(demo_model(kind="f32"), options)


def mixed_prompts(session: Session) -> list[list[int]]:
    """Eight prompts of 8 to about 250 tokens: the long ones are conversations."""
    prompts = []
    for i in range(8):
        messages = []
        for question in QUESTIONS[i : i + 1 + (i % 4) * 6]:
            messages += [{"role": "user", "content": question}]
            messages += [{"role": "assistant", "content": question[::-1]}]
        prompts.append(session.chat_tokens(messages[:-1])[-250:])
    return prompts


def answer(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], Stats]:
    tokens: list[int] = []
    for chunk in engine.generate([prompt], GREEDY, n):
        tokens += chunk.tokens
    assert chunk.stats is not None
    return tokens, chunk.stats


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[list[int], Stats]]:
    """Each prompt's text and statistics in an engine of its own, nothing read before."""
    results = {}
    with load(STRICT) as session:
        prompts = mixed_prompts(session)
    for i, prompt in enumerate(prompts):
        with load(STRICT) as session:
            results[i] = answer(session.engine, prompt, 60)
    return results


@pytest.mark.parametrize("seed", range(5))
def test_text_and_acceptance_beside_others_are_those_alone(
    seed: int, alone: dict[int, tuple[list[int], Stats]]
) -> None:
    """Sequences join and leave at random rounds; some leave early."""
    rng = random.Random(seed)
    with load(dataclasses.replace(STRICT, n_seq=8)) as session:
        engine, prompts = session.engine, mixed_prompts(session)
        waiting = rng.sample(range(8), 8)
        running: dict[int, int] = {}
        texts: dict[int, list[int]] = {i: [] for i in range(8)}
        stats: dict[int, Stats] = {}
        guest = engine.submit(prompts[0][::-1], GREEDY, 200)  # leaves early
        while waiting or running:
            if waiting and rng.random() < 0.5:
                i = waiting.pop()
                running[engine.submit(prompts[i], GREEDY, 60)] = i
            for chunk in engine.step():
                if chunk.seq in running:
                    texts[running[chunk.seq]] += chunk.tokens
                    if chunk.stats:
                        stats[running.pop(chunk.seq)] = chunk.stats
            if rng.random() < 0.05:
                engine.cancel(guest)
    for i, (text, solo) in alone.items():
        assert texts[i] == text
        assert stats[i].acceptance_rate == pytest.approx(solo.acceptance_rate, abs=0.02)


class Passes:
    """Counts how often llama.cpp computes a context's output: once per pass over its weights."""

    def __init__(self) -> None:
        self.n = 0
        base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
        self._name = base.ggml_get_name
        self._name.argtypes, self._name.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def _see(self, tensor: int, ask: bool, _user: object) -> bool:
        if ask and self._name(tensor) == b"result_output":
            self.n += 1
        return not ask  # no node is asked for; computing goes on


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    counter, defaults = Passes(), llama_cpp.llama_context_default_params

    def counted() -> llama_cpp.llama_context_params:
        params = defaults()
        params.cb_eval = counter.callback
        return params

    monkeypatch.setattr(llama_cpp, "llama_context_default_params", counted)
    return counter


@pytest.mark.parametrize("draft", ["off", "mtp"])
def test_one_pass_over_the_weights_per_round(draft: str, passes: Passes) -> None:
    """Uneven rows per sequence, drafts, and prompts that are still read: all in one decode, and
    llama.cpp does not split it."""
    depth = 0 if draft == "off" else 3
    options = dataclasses.replace(
        STRICT, n_seq=6, draft="off" if depth == 0 else "mtp", draft_min=depth, draft_max=depth
    )
    with load(options) as session:
        engine, prompts = session.engine, mixed_prompts(session)
        target = engine._target
        waiting = [p[: 20 + 15 * i] for i, p in enumerate(prompts)]
        for prompt in waiting[:4]:
            engine.submit(prompt, GREEDY, 30)
        n_rounds, before = 0, passes.n
        mtp = engine.drafting.drafter("mtp")
        n_mtp = mtp._context.n_decodes if mtp else 0  # type: ignore[attr-defined]
        n_target = target.n_decodes  # type: ignore[attr-defined]
        while not engine.is_idle:
            if n_rounds in (3, 5, 9, 11):
                engine.submit(waiting.pop(), GREEDY, 30)
            engine.step()
            n_rounds += 1
        assert target.n_decodes - n_target == n_rounds  # type: ignore[attr-defined]
        if mtp:
            n_mtp = mtp._context.n_decodes - n_mtp  # type: ignore[attr-defined]
            assert n_mtp <= n_rounds * depth  # batched across the sequences
        assert passes.n - before == n_rounds + n_mtp


def test_reuse_gives_the_text_and_acceptance_of_a_cold_run() -> None:
    first = [{"role": "user", "content": QUESTIONS[3]}]
    with load(dataclasses.replace(STRICT, n_seq=3)) as warm, load(STRICT) as cold:
        text, _ = answer(warm.engine, warm.chat_tokens(first), 40)
        said = "".join(warm.vocab.piece(t).decode(errors="replace") for t in text)
        for question in QUESTIONS[4:9]:  # five branches of one conversation
            branch = [
                *first,
                {"role": "assistant", "content": said},
                {"role": "user", "content": question},
            ]
            tokens = warm.chat_tokens(branch)
            again, stats = answer(warm.engine, tokens, 60)
            assert stats.cached_tokens >= len(warm.chat_tokens(first)) - 1
            cold.engine._slots.evict_idle()
            expected, cold_stats = answer(cold.engine, tokens, 60)
            assert cold_stats.cached_tokens == 0
            assert again == expected
            assert stats.accepted_per_position == cold_stats.accepted_per_position


def test_a_saved_sequence_goes_on_in_another_process_as_in_this_one() -> None:
    """Both contexts and the buffered rows travel; a cold run gives the same."""
    prompt_of = [{"role": "user", "content": QUESTIONS[5]}]
    with load(STRICT) as session:
        prompt = session.chat_tokens(prompt_of)
        text, _ = answer(session.engine, prompt, 40)
        data = session.engine.save([*prompt, *text])
        follow_up = [*prompt, *text, *prompt[1:]]
        expected, here = answer(session.engine, follow_up, 60)
    with load(STRICT) as fresh:
        assert fresh.engine.restore(data) == [*prompt, *text]
        again, there = answer(fresh.engine, follow_up, 60)
    assert there.cached_tokens == here.cached_tokens == len(prompt) + len(text) - 1
    assert again == expected
    assert there.accepted_per_position == here.accepted_per_position


def test_a_saved_sequence_of_another_model_or_cache_is_refused() -> None:
    with load(STRICT) as session:
        prompt = session.chat_tokens([{"role": "user", "content": "Hello"}])
        text, _ = answer(session.engine, prompt, 10)
        data = session.engine.save([*prompt, *text])
    with load(dataclasses.replace(STRICT, strict=False)) as other:
        with pytest.raises(gguf_mtp.GgufMtpError, match="another model or other settings"):
            other.engine.restore(data)
        assert answer(other.engine, prompt, 10)[1].cached_tokens == 0
    with (
        gguf_mtp.load(demo_model(), STRICT) as quantised,
        pytest.raises(gguf_mtp.GgufMtpError, match="another model"),
    ):
        quantised.engine.restore(data)
