"""Examples in the documents run, as a reader would run them."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_mtp.demo import demo_model
from tests.support.processes import process

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(code, id=f"{document}-{i}")
    for document in ("README.md", "docs/PYTHON.md", "docs/PLACEMENT.md")
    for i, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)
    )
]
EXPECTED = {
    "docs/PYTHON.md-0": "The capital of France is Paris.",
    "docs/PYTHON.md-1": "The capital of France isThe capital of France is Paris.",
    "docs/PYTHON.md-3": "What is the capital of Italy? The capital of Italy is Rome.",
    "docs/PYTHON.md-4": "cancelled 2",
    "docs/PLACEMENT.md-0": "CPU ",
    "docs/PYTHON.md-5": "tokens were not read again",
}


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name in ("model.gguf", "v3.gguf"):
        (tmp_path / name).symlink_to(demo_model())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert EXPECTED.get(request.node.callspec.id, "") in done.stdout
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("chat", ["What is the capital of France?"], "The capital of France is Paris.\n"),
        (
            "batch",
            ["questions.txt"],
            "of Peru? -> The capital of Peru is Lima.",
        ),
        ("structured", ["Plan a journey."], " days in "),
    ],
)
def test_a_program_in_examples(
    example: str, arguments: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "questions.txt").write_text("What is the capital of Peru?\nHello\n")
    program = [sys.executable, str(ROOT / "examples" / f"{example}.py"), str(demo_model())]
    done = subprocess.run(
        [*program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_the_client_in_examples_talks_to_the_server() -> None:
    question = "What is the capital of France?"
    program = [sys.executable, str(ROOT / "examples" / "openai_client.py")]
    with process("--temp", "0") as running:
        done = subprocess.run(
            [*program, running.url, question], capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr


@pytest.mark.parametrize("example", ["batch", "chat", "openai_client", "structured"])
def test_a_program_in_examples_says_how_it_is_called(example: str) -> None:
    program = [sys.executable, str(ROOT / "examples" / f"{example}.py")]
    bare = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (bare.returncode, bare.stdout) == (1, "")
    assert f"python examples/{example}.py " in bare.stderr
    assert "Traceback" not in bare.stderr
    wrong = subprocess.run([*program, "no", "file"], capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: ")


def test_no_example_is_forgotten() -> None:
    tested = {"batch", "chat", "openai_client", "structured"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


NAMES = [
    (document, name)
    for document in [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
    for name in sorted(
        set(re.findall(r"`(gguf_mtp(?:\.\w+)+)", (ROOT / document).read_text(encoding="utf-8")))
    )
]


@pytest.mark.parametrize(("document", "name"), NAMES, ids=lambda value: str(value))
def test_a_dotted_name_exists(document: Path, name: str) -> None:
    """`gguf_mtp.a.b.C`: the longest part that is a module is imported, the rest looked up."""
    del document
    assert pkgutil.resolve_name(name) is not None
