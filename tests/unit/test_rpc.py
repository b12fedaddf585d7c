"""Workers: what is refused before ggml could end the process, what is said of a lost one."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gguf_mtp.errors import LoadFailed, RequestError
from gguf_mtp.placement.rpc_probe import parse_endpoints, probe_worker
from gguf_mtp.telemetry.trace import read
from tests.support.processes import COMMAND, process
from tests.support.worlds import MIB, Worker, workers


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens on loopback and answers one connection in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def hello(major: int, minor: int) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(64)
        connection.sendall(struct.pack("<Q4B24x", 28, major, minor, 0, 0))
        connection.recv(64)

    return answer


def test_a_worker_of_another_version_is_refused() -> None:
    with listening(hello(6, 0)) as endpoint, pytest.raises(LoadFailed, match=r"speaks RPC 6.0"):
        probe_worker(endpoint)


def test_what_is_no_worker_is_refused() -> None:
    def web(connection: socket.socket) -> None:
        connection.recv(64)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with (
        listening(web) as endpoint,
        pytest.raises(LoadFailed, match="is not a worker of this version"),
    ):
        probe_worker(endpoint)


def test_a_silent_worker_is_busy() -> None:
    release = threading.Event()

    def silent(_: socket.socket) -> None:
        release.wait(10)

    with listening(silent) as endpoint:
        with pytest.raises(LoadFailed, match="does not answer: it is serving another run"):
            probe_worker(endpoint, timeout=0.2)
        release.set()


def test_a_port_without_a_worker_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(LoadFailed, match=f"no worker at {endpoint}: Connection refused"):
        probe_worker(endpoint)


def test_endpoints_are_read() -> None:
    assert parse_endpoints("a:1, b:2,[::1]:3") == ("a:1", "b:2", "[::1]:3")
    for bad in ("", "a", "a:0", "a:70000", "a:b", "a:1,a:1"):
        with pytest.raises(RequestError):
            parse_endpoints(bad)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_a_worker_listens_to_this_machine_only() -> None:
    done = run("worker", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 1
    assert re.match(
        r"error: 0.0.0.0 can be reached by other machines, and ggml's RPC has no auth", done.stderr
    )
    assert done.stdout == ""


@pytest.mark.native
def test_a_worker_lends_what_it_is_told() -> None:
    with workers(64 * MIB) as (worker,):
        found = probe_worker(worker.endpoint)
    ((free, total),) = found.memory
    assert total == 64 * MIB
    assert 60 * MIB < free <= total


def long_run(worker: Worker) -> subprocess.Popen[str]:
    """An answer that goes on until its context is full, on a device of the worker's."""
    command = [COMMAND, "run", "--raw", "-p", "The capital of", "--temp", "9", "--min-p", "0"]
    command += ["--top-k", "0", "--top-p", "1", "-n", "-1", "-t", "1", "--fit-margin", "0"]
    return subprocess.Popen(
        [*command, "--rpc", worker.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.native
def test_a_run_says_which_worker_was_lost() -> None:
    with workers(400 * MIB) as (worker,):
        running = long_run(worker)
        assert running.stdout is not None
        assert running.stdout.read(5)  # the answer has begun
        worker.kill()
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 1
    assert errors == f"error: the worker at {worker.endpoint} was lost, and the answer with it\n"


@pytest.mark.native
def test_a_chat_says_which_worker_was_lost() -> None:
    with workers(400 * MIB) as (worker,):
        command = [COMMAND, "chat", "-t", "1", "--temp", "0", "--fit-margin", "0"]
        chat = subprocess.Popen(
            [*command, "--rpc", worker.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write("What is the capital of France?\n")
        chat.stdin.flush()
        assert chat.stdout.readline() == "The capital of France is Paris.\n"
        worker.kill()
        _, errors = chat.communicate("What is the capital of Italy?\n", timeout=30)
    assert chat.returncode == 1
    assert errors == f"error: the worker at {worker.endpoint} was lost, and the answer with it\n"


def post(url: str, body: dict[str, object]) -> urllib.request.Request:
    headers = {"content-type": "application/json"}
    return urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)


ENDLESS = {"prompt": "The capital of", "max_tokens": 6000, "logit_bias": {"1": -100}}


@pytest.mark.native
def test_a_server_outlives_its_worker(tmp_path: Path) -> None:
    """kill -9 while two answers are written: both are told, new ones are refused by name, and when
    the worker is back answers are made again, into the same trace."""
    trace = tmp_path / "trace"
    with workers(400 * MIB) as (worker,):
        arguments = ("--rpc", worker.endpoint, "--fit-margin", "0", "-t", "1", "--parallel", "2")
        with process(*arguments, "--log", "off", "--trace", str(trace)) as server:
            with urllib.request.urlopen(post(server.url, ENDLESS | {"max_tokens": 4})) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            failures: list[tuple[int, str]] = []

            def whole() -> None:
                try:
                    urllib.request.urlopen(post(server.url, ENDLESS), timeout=60)
                except urllib.error.HTTPError as error:
                    failures.append((error.code, error.read().decode()))

            thread = threading.Thread(target=whole)
            thread.start()
            stream = urllib.request.urlopen(post(server.url, ENDLESS | {"stream": True}))
            stream.readline()
            time.sleep(0.3)
            worker.kill()
            events = stream.read().decode().split("\n\n")
            thread.join(30)
            named = f"the worker at {worker.endpoint} was lost"
            assert named in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
            assert [code for code, _ in failures] == [503]
            assert named in failures[0][1]
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(post(server.url, ENDLESS), timeout=60)
            assert refused.value.code == 503
            assert named in refused.value.read().decode()
            port = int(worker.endpoint.rpartition(":")[2])
            again = Worker(400 * MIB, port)
            try:
                assert answers_within(server.url, 60)
            finally:
                errors = server.stop()
                again.kill()
                if again.process.stdout:
                    again.process.stdout.close()
        assert errors.startswith(f"error: {named}")
        assert server.process.returncode == 0
    recording = read(trace)
    requests = {part.request for moment in recording.moments for part in moment.report.parts}
    assert (recording.n_starts, len(requests)) == (2, 4)


@pytest.mark.native
def test_a_token_s_bytes_on_the_wire() -> None:
    """Plain decoding of the demo: the logits of one row come back, and little goes there."""
    from gguf_mtp.bench.wire import measure
    from gguf_mtp.demo import demo_model
    from gguf_mtp.offload.options import PlacementOptions

    with workers(400 * MIB) as (worker,):
        found = measure(demo_model(), worker.endpoint, PlacementOptions(), 0)
    logits = 4096 * 4 / 1e3
    assert logits < found["received_kb_per_token"] < 1.25 * logits
    assert 1 < found["sent_kb_per_token"] < 20
    assert found["loading_mb"] > 9  # the weights, at 8 bits


@pytest.mark.native
def test_an_engine_does_not_outlive_its_server() -> None:
    with workers(400 * MIB) as (worker,):
        arguments = ("--rpc", worker.endpoint, "--fit-margin", "0", "-t", "1", "--log", "off")
        with process(*arguments) as server:
            pid = server.process.pid
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            server.stop(signal.SIGKILL)
            end = time.monotonic() + 20
            while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < end:
                time.sleep(0.1)
            assert not Path(f"/proc/{child}/cmdline").exists()


def answers_within(url: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(post(url, ENDLESS | {"max_tokens": 4})) as answer:
                return bool(json.load(answer)["usage"]["completion_tokens"] == 4)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.5)
    return False
