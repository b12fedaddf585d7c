"""What `gguf-mtp serve` counts and writes, against what its answers say of themselves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gguf_mtp.telemetry.trace import read
from tests.support.processes import COMMAND, process

FIXED = ("--strict", "--draft-min", "2", "--draft-max", "2", "--temp", "0", "-np", "2")


def samples(text: str) -> dict[str, float]:
    return {
        ",".join((s.name.removeprefix("gguf_mtp:"), *s.labels.values())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


@pytest.mark.native
def test_metrics_log_and_trace_agree_with_the_answers(tmp_path: Path) -> None:
    log, trace = tmp_path / "log", tmp_path / "trace"
    questions = ["What is the capital of France?", "What is a fox?", "Name three animals."]
    timings: list[dict[str, Any]] = []
    with process(*FIXED, "--log", str(log), "--trace", str(trace)) as running:
        base = running.url.removesuffix("/v1")
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
            for question in questions:
                body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40}
                answer = http.post("/v1/chat/completions", json=body | {"n": 2}).json()
                timings.append(answer["timings"] | {"usage": answer["usage"]})
            found = samples(http.get("/metrics").text)
        assert running.stop() == ""

    def total(name: str) -> int:
        return sum(t[name] for t in timings)

    assert found["decode_tokens_total"] == total("decode_tokens") > 0
    assert found["prefill_tokens_total"] == total("prefill_tokens") > 0
    assert found["cached_tokens_total"] == total("cached_tokens") > 0
    assert found["spec_decode_num_draft_tokens_total,mtp"] == total("drafted") > 0
    assert found["spec_decode_num_accepted_tokens_total,mtp"] == total("accepted") > 0
    for k in range(2):
        accepted = sum(t["accepted_per_position"][k] for t in timings)
        assert found[f"spec_decode_num_accepted_tokens_per_pos_total,{k}"] == accepted
    assert found["draft_depth_count"] == total("rounds")
    assert found["answers_total,stop"] + found.get("answers_total,length", 0) == 6
    assert found["time_to_first_token_seconds_count"] == 6
    assert found["http_responses_total,200"] == 3
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
    assert 0 < found["kv_cells_used"] < found["kv_cells"]

    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["answer_tokens"] for r in records] == [
        t["usage"]["completion_tokens"] for t in timings
    ]
    assert [r["accepted"] for r in records] == [t["accepted"] for t in timings]

    recording = read(trace)
    assert recording.about["depth_max"] == 2
    assert recording.about["n_seq"] == 2
    assert len(recording.moments) == found["rounds_total"]
    parts = [p for m in recording.moments for p in m.report.parts]
    assert {p.reason for p in parts} == {"first token", "fixed"}
    assert sum(p.n_committed for p in parts) == total("decode_tokens")
    assert sum(p.n_accepted for p in parts) == total("accepted")
    assert sum(m.report.draft_s for m in recording.moments) == pytest.approx(
        found["round_draft_seconds_sum,decode"] + found["round_draft_seconds_sum,prefill"], abs=1e-3
    )
    times = [m.t for m in recording.moments]
    assert times == sorted(times)


@pytest.mark.native
def test_a_full_disk_does_not_touch_the_answers() -> None:
    full = ("--log", "/dev/full", "--trace", "/dev/full")
    with process(*FIXED, *full) as running:
        base = running.url.removesuffix("/v1")
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
            answer = http.post("/v1/chat/completions", json=body)
            text = answer.json()["choices"][0]["message"]["content"]
            found = samples(http.get("/metrics").text)
        warnings = running.stop(signal.SIGTERM)
    assert text == "The capital of France is Paris."
    assert running.process.returncode == 0
    assert found["lost_lines_total"] > 2
    warning = "warning: lines for /dev/full are being lost: No space left on device\n"
    assert warnings == 2 * warning  # one for each file


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_no_memory_for_the_context_is_one_sentence() -> None:
    """The demo and its libraries fit within the limit; a KV cache of 690 MB does not."""
    serve = f"ulimit -v 700000; exec {COMMAND} serve --port 0 -c 2048 -np 250 -t 1"
    done = subprocess.run(["bash", "-c", serve], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(
        r"error: cannot create a context of 512000 cells: .*; its KV cache needs \d+ MB\n",
        done.stderr,
    )
