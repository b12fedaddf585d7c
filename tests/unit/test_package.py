"""What is installed: the wheel's contents, imports that stay light, a command that starts fast."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import gguf_mtp
from gguf_mtp.params import SamplingParams

ROOT = Path(__file__).parents[2]
HEAVY = ("llama_cpp", "torch", "fastapi", "rich")
# llama/ and what is built on it may load llama.cpp; the command line loads what a command needs.
NOT_PURE = {f"gguf_mtp.loading.{name}" for name in ("build", "first_load", "loader")}
NOT_PURE |= {f"gguf_mtp.placement.{name}" for name in ("checked_plan", "detect", "draft_placement")}
NOT_PURE_BELOW = ("gguf_mtp.bench", "gguf_mtp.cli", "gguf_mtp.llama", "gguf_mtp.server")


def pure_modules() -> list[str]:
    folders = {"gguf_mtp": "gguf_mtp", "converters": "gguf_mtp.converters"}
    names = []
    for folder, package in folders.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    pure = [name for name in names if name not in NOT_PURE]
    return [name for name in pure if not name.startswith(NOT_PURE_BELOW)]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no stale build folder of the clone can leak in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source)
    (built,) = out.glob("*.whl")
    return built


# -- the wheel -----------------------------------------------------------------------------------


@pytest.mark.package
def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gguf_mtp", f"gguf_mtp-{gguf_mtp.__version__}.dist-info"}


@pytest.mark.package
def test_the_wheel_holds_all_modules_and_the_demo(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"gguf_mtp": "gguf_mtp"} | {
        name: f"gguf_mtp/{name}" for name in ("bench", "cli", "converters")
    }
    training = ROOT / "bench" / "demo_model"  # for whoever has the clone
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in folders.items()
        for path in (ROOT / folder).rglob("*.py")
        if training not in path.parents
    }
    expected |= {f"gguf_mtp/bench/prompts/{path.name}" for path in ROOT.glob("bench/prompts/*")}
    page = ROOT / "gguf_mtp" / "server" / "web"
    expected |= {f"gguf_mtp/server/web/{path.name}" for path in page.iterdir()}
    templates = (ROOT / "converters" / "templates").iterdir()
    expected |= {f"gguf_mtp/converters/templates/{path.name}" for path in templates}
    checkpoint = ROOT / "gguf_mtp" / "demo" / "checkpoint"
    expected |= {f"gguf_mtp/demo/checkpoint/{path.name}" for path in checkpoint.iterdir()}
    assert len(list(checkpoint.glob("*.safetensors"))) == 3
    assert expected | {"gguf_mtp/py.typed"} == {n for n in names if n.startswith("gguf_mtp/")}
    notices = {name.split("/licenses/")[-1] for name in names if "/licenses/" in name}
    assert notices == {"LICENSE", "bench/demo_model/NOTICES.md"}


# -- imports -------------------------------------------------------------------------------------


@pytest.mark.package
def test_pure_modules_import_nothing_heavy() -> None:
    modules = pure_modules()
    assert {
        "gguf_mtp.answers.detokenizer",
        "gguf_mtp.sampling.chain",
        "gguf_mtp.drafters.mtp",
    } <= set(modules)
    # One fresh interpreter a module would take a minute: in one, each module is imported anew.
    script = f"""
import importlib, sys
fresh = set(sys.modules)
for name in {modules}:
    importlib.import_module(name)
    found = set({HEAVY}) & set(sys.modules)
    if found:
        print(name, "imports", *sorted(found))
    for loaded in set(sys.modules) - fresh:
        if loaded.split(".")[0] in ("gguf_mtp", *{HEAVY}):
            del sys.modules[loaded]
"""
    assert run(sys.executable, "-c", script) == ""


@pytest.mark.package
def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = (*HEAVY, "numpy", "jinja2", "gguf", "prompt_toolkit")
    script = f"import sys, gguf_mtp.cli.app\nprint(*sorted(set({heavy}) & set(sys.modules)))"
    assert run(sys.executable, "-c", script).strip() == ""


def test_declared_names_are_there() -> None:
    """Their order is ruff's business (RUF022)."""
    assert declared("gguf_mtp")
    for name in pure_modules():
        module = importlib.import_module(name)
        missing = [item for item in declared(name) or () if not hasattr(module, item)]
        assert missing == [], name


ORDER = [
    "errors",
    "stats",
    "deep_stack",
    "child",
    "types",
    "params",
    "sampling",
    "grammar",
    "depth",
    "chat",
    "gguf",
    "offload",
    "drafters",
    "engine",
    "llama",
    "telemetry",
    "placement",
    "answers",
    "session",
    "loading",
    "server",
]


def test_imports_point_one_way() -> None:
    """A room imports only rooms in front of it (docs/ARCHITECTURE.md)."""
    wrong = []
    for path in sorted((ROOT / "gguf_mtp").rglob("*.py")):
        room = path.relative_to(ROOT / "gguf_mtp").with_suffix("").parts[0]
        if room in ("__init__", "demo"):  # the one names modules, the other uses the converter
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gguf_"):
                continue
            parts = str(node.module).split(".")[1:] or [alias.name for alias in node.names]
            if parts[0] != room and ORDER.index(parts[0]) > ORDER.index(room):
                wrong.append(f"{path.relative_to(ROOT)} imports {parts[0]}")
    assert wrong == []


def test_documents_name_files_that_exist() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    documents += [*(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")]
    found = [
        (document.name, name)
        for document in documents
        for name in re.findall(r"\b(?:tests|gguf_mtp|examples)/[\w/]+\.py\b", document.read_text())
    ]
    assert len(found) > 20
    assert [(where, name) for where, name in found if not (ROOT / name).exists()] == []


def declared(module: str) -> list[str] | None:
    """`__all__` as it stands in the source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


@pytest.mark.package
def test_help_starts_nearly_as_fast_as_typer() -> None:
    """By what it imports: a module takes about as long on any one machine."""

    def modules(code: str) -> set[str]:
        show = "import sys; print('modules', *sys.modules)"
        printed = run(sys.executable, "-c", f"{code}\n{show}")
        return set(printed.rpartition("modules ")[2].split())

    help_ = modules(
        "import sys\nsys.argv = ['gguf-mtp', '--help']\nfrom gguf_mtp.cli.entry import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    typer = modules("import typer, typer.rich_utils")
    heavy = {"numpy", "llama_cpp", "pydantic", "fastapi", "uvicorn", "jinja2", "gguf", "torch"}
    assert not help_ & heavy
    assert len(help_ - typer) < 80, sorted(help_ - typer)


# -- the documents' picture of the tree ------------------------------------------------------------


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`?((?:[a-z_]+/)+[a-z_]+\.(?:py|md))", text)):
        assert any((ROOT / top / name).exists() for top in ("", "gguf_mtp")), name
    rooms = {path.name for path in (ROOT / "gguf_mtp").iterdir() if (path / "__init__.py").exists()}
    assert {room for room in rooms if f"      {room}/ " not in text} == set()


def test_a_field_is_honoured_or_refused_and_not_both() -> None:
    from gguf_mtp.server.field_tables import HARMLESS, NOT_BUILT
    from gguf_mtp.server.schemas import ChatRequest, CompletionRequest

    honoured = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    for table in (NOT_BUILT, HARMLESS):
        assert honoured & table.keys() == set()
        assert {*SamplingParams.__dataclass_fields__} & table.keys() == set()
    assert NOT_BUILT.keys() & HARMLESS.keys() == set()


# -- a fresh install -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.package
def test_a_fresh_install_answers_without_torch(wheel: Path, tmp_path: Path) -> None:
    llama_wheel = run(ROOT / ".ci" / "llama-wheel").strip()
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", llama_wheel, wheel)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [python.with_name("gguf-mtp"), "chat", "--temp", "0"],
        input="What is the capital of France?\n",
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    installed = run(python, "-m", "pip", "list", cwd=tmp_path).split()
    assert "gguf-mtp" in installed
    assert "torch" not in installed
