"""Downloads against a hub on loopback that fails as real ones do; nothing else is contacted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.hub import Hub, Repo, fetch_checkpoint, parse, pull
from gguf_mtp.converters.planning import ConvertOptions as Options
from gguf_mtp.converters.repo_files import choose
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import INDEX, layout, read_all, write
from tests.support.fake_hub import serving
from tests.support.hub_world import MINE, World, world

__all__ = ["world"]


def same(folder: Path) -> bool:
    return all((folder / p.name).read_bytes() == p.read_bytes() for p in CHECKPOINT.iterdir())


def test_fetches_the_checkpoint_once(world: World) -> None:
    folder = world.checkpoint()
    assert same(folder)
    sent = dict(world.fake.sent)
    assert world.checkpoint() == folder
    assert world.fake.sent == sent
    assert world.pauses == []


def test_kimis_tokenizer_comes_along(world: World) -> None:
    """Its release has no tokenizer.json."""
    files = world.fake.repos["me/demo"]
    del files["tokenizer.json"]
    files |= {"tiktoken.model": b"IQ== 0\n", "tokenization_kimi.py": b"pat_str = ''\n"}
    folder = world.checkpoint()
    assert (folder / "tiktoken.model").read_bytes() == b"IQ== 0\n"
    assert (folder / "tokenization_kimi.py").exists()
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.native
def test_only_the_blocks_shards_are_fetched(world: World, tmp_path: Path) -> None:
    """The demo's block, head and embedding, spread as a release spreads them: 3 shards of 8."""
    tensors = read_all(CHECKPOINT)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    order = [e for e in layout(config) if e.name in tensors]
    data = {entry.name: raw for entry, raw in tensors.values()}
    source = write(
        tmp_path / "eight",
        config,
        [tensors[e.name][0] for e in order],
        lambda e: data[e.name],
        n_shards=8,
    )
    world.fake.repos["me/eight"] = {p.name: p.read_bytes() for p in source.iterdir()}
    folder = world.checkpoint("only", Repo("me/eight"))
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    block = ("model.layers.6.", "model.embed", "model.norm", "lm_head")
    needed = {file for name, file in weight_map.items() if name.startswith(block)}
    fetched = {p.name for p in folder.glob("*.safetensors")}
    assert fetched == needed
    assert len(needed) < len(set(weight_map.values())) == 8
    convert(folder, tmp_path / "a.gguf", ConvertOptions(mtp="only", name="demo"))
    convert(CHECKPOINT, tmp_path / "b.gguf", ConvertOptions(mtp="only", name="demo"))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


SHARD = "model-00002-of-000003.safetensors"


def test_a_dropped_connection_goes_on_where_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps whole chunks only: 10 MB ones, larger than these shards.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    world.fake.faults[SHARD] = ["drop", "drop"]
    assert same(world.checkpoint())
    size = len(world.fake.repos["me/demo"][SHARD])
    assert world.fake.asked[SHARD] >= 2
    assert world.fake.sent[SHARD] < 1.5 * size


@pytest.mark.parametrize("fault", [429, 503, 500, "refuse"])
def test_what_may_pass_is_tried_again(world: World, fault: int | str) -> None:
    world.fake.faults[SHARD] = [fault] * 3
    assert same(world.checkpoint())


@pytest.mark.parametrize(
    ("fault", "says"),
    [(429, r"answers 429 \(too many requests\)"), (503, "answers 503"), ("refuse", "disconnected")],
)  # fmt: skip
def test_what_does_not_pass_is_a_sentence(world: World, fault: int | str, says: str) -> None:
    world.fake.faults["config.json"] = [fault] * 500
    with pytest.raises(ConversionError, match=f"cannot fetch me/demo/config.json after 5.*{says}"):
        world.checkpoint()
    assert world.pauses == [1, 2, 4, 8]


def test_no_access_is_not_tried_again(world: World) -> None:
    world.fake.faults[SHARD] = [403] * 100
    with pytest.raises(ConversionError, match=rf"{SHARD}: the hub answers 403 \(no access\)"):
        world.checkpoint()
    assert world.pauses == []


def test_repositories_that_are_not_there(world: World) -> None:
    for repo, says in [
        (Repo("me/none"), "me/none does not exist on the hub, or needs a token"),
        (Repo("me/demo", "v9"), "me/demo has no revision 'v9'"),
    ]:
        with pytest.raises(ConversionError, match=says):
            world.checkpoint(repo=repo)
    assert world.checkpoint(repo=Repo("me/demo", "v1")).exists()
    world.fake.repos["me/empty"] = {"README.md": b""}
    with pytest.raises(ConversionError, match=r"me/empty has no config.json, so it is not a check"):
        world.checkpoint(repo=Repo("me/empty"))
    del world.fake.repos["me/demo"][SHARD]
    with pytest.raises(ConversionError, match=f"me/demo has no {SHARD}, which its index lists"):
        world.checkpoint()


def test_a_token_opens_what_is_private(world: World, tmp_path: Path) -> None:
    world.fake.private.add("me/demo")
    with pytest.raises(ConversionError, match="needs a token"):
        world.checkpoint()
    hub = Hub(world.fake.endpoint, tmp_path / "cache", "hf_secret", world.pauses.append)
    assert same(fetch_checkpoint(hub, MINE, Options().needs))
    assert "Bearer hf_secret" in world.fake.tokens


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with serving() as fake:
        endpoint = fake.endpoint
    pauses: list[float] = []
    hub = Hub(endpoint, tmp_path, None, pauses.append)
    with pytest.raises(ConversionError, match=r"cannot fetch me/demo/config\.json after 5 tries: "):
        fetch_checkpoint(hub, MINE, Options().needs)


# -- GGUF files --------------------------------------------------------------------------------

FILES = [
    "README.md", "mmproj-F16.gguf", "mtp-demo-Q8_0.gguf", "mtp-demo-Q4_K_M.gguf",
    "demo-Q8_0.gguf",
    "Q4_K_M/demo-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/demo-Q4_K_M-00002-of-00002.gguf",
    "demo-IQ4_XS-00001-of-00003.gguf",
]  # fmt: skip


def test_pull_fetches_shards_and_side_file(world: World, tmp_path: Path) -> None:
    world.fake.repos["me/gguf"] = {file: file.encode() * 100 for file in FILES}
    world.fake.faults[FILES[6]] = ["drop", 503]
    out = tmp_path / "out"
    paths = pull(world.hub, Repo("me/gguf"), "q4_k_m", out)
    assert paths == [out / FILES[5], out / FILES[3]]
    for file in (FILES[3], *FILES[5:7]):
        assert (out / file).read_bytes() == file.encode() * 100
    assert not (out / FILES[4]).exists()


@pytest.mark.parametrize(
    ("files", "quant", "says"),
    [
        (FILES, None, "me/gguf has .*demo-Q8_0.*: choose one with REPO:QUANT"),
        (FILES, "Q5_0", "0 of them match Q5_0"),
        (FILES, "Q8", "0 of them match Q8"),
        (FILES, "IQ4_XS", "has 1 of 3 shards of demo-IQ4_XS"),
        (["a.safetensors"], None, "has no GGUF model"),
        (["mtp-x.gguf"], None, "has no GGUF model"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen(files: list[str], quant: str | None, says: str) -> None:
    with pytest.raises(ConversionError, match=says):
        choose(files, "me/gguf", quant)


def test_choose() -> None:
    repo = "me/gguf"
    assert choose(FILES, repo, "Q8_0") == (["demo-Q8_0.gguf"], ["mtp-demo-Q8_0.gguf"])
    assert choose(["a.gguf"], repo, None) == (["a.gguf"], None)
    assert choose(["a-Q4_0.gguf", "mtp-a.gguf"], repo, "Q4_0")[1] == ["mtp-a.gguf"]
    assert choose(["a.gguf", "dspark-a.gguf"], repo, None) == (["a.gguf"], ["dspark-a.gguf"])


def test_names_of_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("me/demo") == Repo("me/demo")
    assert parse("me/demo-1.5@refs/pr/3") == Repo("me/demo-1.5", "refs/pr/3")
    for text in ("demo", "/me/demo", "./demo", "../x/y", "a/b/c", "me/demo@", "me/de mo"):
        assert parse(text) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "demo").mkdir(parents=True)
    assert parse("me/demo") is None


@pytest.mark.parametrize(("code", "n_pauses"), [(socket.EAI_NONAME, 0), (socket.EAI_AGAIN, 4)])
def test_without_a_network_nothing_is_tried_again(code: int, n_pauses: int) -> None:
    """huggingface_hub has tried for half a minute by then; a resolver that is busy may recover."""
    pauses: list[float] = []

    def ask(_: object) -> None:
        try:
            raise socket.gaierror(code, "Name or service not known")
        except OSError:
            raise OSError("the client's own words") from None  # as httpcore does

    with pytest.raises(ConversionError, match=r"cannot fetch a/b( after 5 tries)?: the"):
        Hub(pause=pauses.append)._ask(Repo("a/b"), ask)
    assert len(pauses) == n_pauses


def test_a_hub_whose_name_does_not_exist_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a proxy it is: only the proxy knows the name."""
    asked: list[object] = []

    def list_files(*_: object, **__: object) -> list[str]:
        asked.append(True)
        return ["a.gguf"]

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_files)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub = Hub(endpoint="https://hub.invalid", pause=asked.append)
    with pytest.raises(ConversionError, match="the hub's name cannot be resolved"):
        hub.files(Repo("a/b"))
    assert not asked
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.files(Repo("a/b")) == ["a.gguf"]


def test_without_a_network_the_cache_is_enough(world: World) -> None:
    here = world.checkpoint()
    cut_off = Hub(endpoint="https://hub.invalid", cache=world.hub.cache, pause=world.pauses.append)
    assert cut_off.fetch(MINE, "config.json") == here / "config.json"
    with pytest.raises(ConversionError, match=r"cannot fetch me/demo/no\.json: the hub's name"):
        cut_off.fetch(MINE, "no.json")


# -- the commands ------------------------------------------------------------------------------


def gguf_mtp(world: World, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_ENDPOINT": world.fake.endpoint, "HF_HOME": str(cwd / "home")}
    command = [sys.executable, "-c", "from gguf_mtp.cli.app import main; main()", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.native
def test_convert_from_the_hub(world: World, tmp_path: Path) -> None:
    done = gguf_mtp(world, tmp_path, "convert", "me/demo@v1", "--mtp", "only", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "mtp-demo.gguf").exists()
    done = gguf_mtp(world, tmp_path, "convert", "me/none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: me/none does not exist on the hub, or needs a token (hf auth login)\n"
    )


def test_pull_says_how_to_run(world: World, tmp_path: Path) -> None:
    world.fake.repos["me/gguf"] = dict.fromkeys(FILES, b"x")
    done = gguf_mtp(world, tmp_path, "pull", "me/gguf:Q8_0", "-o", "models")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models"
    assert done.stdout == (
        f"gguf-mtp run {folder / 'demo-Q8_0.gguf'}\n"
        f"MTP block: {folder / 'mtp-demo-Q8_0.gguf'} (loaded automatically)\n"
    )
    done = gguf_mtp(world, tmp_path, "pull", "nonsense")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
