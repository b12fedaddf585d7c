"""Kimi's tiktoken.model: merges from ranks, ids against tiktoken's own, and malformed files."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_mtp.converters import tiktoken
from gguf_mtp.converters.byte_level import as_bytes, spell
from gguf_mtp.converters.checkpoint import Checkpoint
from gguf_mtp.converters.convert import ConvertOptions, convert
from gguf_mtp.converters.tokenizer import vocabulary
from gguf_mtp.errors import ConversionError
from tests.support.checkpoints import Entry, changed_demo, holes
from tests.support.tokenizers_made import KIMI_NAMED, kimi_ranks, write_kimi
from tests.unit.test_tokenizer import lines

N_RANKS, N_VOCAB = 3000, 4096
BYTES = {bytes([b]): b for b in range(256)}


def small(*more: bytes) -> dict[bytes, int]:
    return BYTES | {token: 256 + i for i, token in enumerate(more)}


def merges(folder: Path, ranks: dict[bytes, int]) -> list[str]:
    write_kimi(folder, ranks)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return tiktoken.read(folder, config).merges


def test_bytes_are_spelled_as_the_published_table() -> None:
    assert spell(b"a \n\xc3\xa9\x00\xad") == "aĠĊÃ©ĀŃ"
    assert as_bytes(spell(bytes(range(256)))) == bytes(range(256))
    assert len(set(spell(bytes(range(256))))) == 256


def test_merges_follow_ranks_not_letters(tmp_path: Path) -> None:
    """`abc` is a+bc when bc came before ab, and ab+c when it came after."""
    assert merges(tmp_path, small(b"bc", b"ab", b"abc")) == ["b c", "a b", "a bc"]
    assert merges(tmp_path, small(b"ab", b"bc", b"abc")) == ["a b", "b c", "ab c"]


def test_a_token_no_merge_makes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert merges(tmp_path, small(b"ab", b"abcd")) == ["a b"]
    assert "1 tokens cannot be merged from smaller ones (the first is b'abcd')" in caplog.text


def as_kimi(folder: Path, ranks: dict[bytes, int], n_vocab: int = N_VOCAB) -> Path:
    def change(config: dict[str, Any], _: dict[str, tuple[Entry, bytes]]) -> None:
        config |= {"vocab_size": n_vocab, "model_type": "kimi_k2"}
        config |= {"bos_token_id": len(ranks), "eos_token_id": len(ranks) + 1}

    source = changed_demo(folder, change, holes)
    write_kimi(source, ranks)
    return source


def kv_of(source: Path) -> dict[str, Any]:
    with Checkpoint(source) as checkpoint:
        return vocabulary(checkpoint, N_VOCAB)


def test_special_tokens_and_padding(tmp_path: Path) -> None:
    kv = kv_of(as_kimi(tmp_path, small(b"ab")))
    tokens, types = kv["tokenizer.ggml.tokens"], kv["tokenizer.ggml.token_type"]
    assert kv["tokenizer.ggml.pre"] == "kimi-k2"
    assert len(tokens) == len(types) == N_VOCAB
    assert (tokens[32], types[32], tokens[256]) == ("Ġ", 1, "ab")
    for i, text in KIMI_NAMED.items():
        assert (tokens[257 + i], types[257 + i]) == (text, 3)
    assert (tokens[257 + 5], types[257 + 5]) == ("<|reserved_token_262|>", 3)
    assert (tokens[257 + 258], types[257 + 258]) == ("[PAD515]", 5)
    ids = {k: kv[f"tokenizer.ggml.{k}_token_id"] for k in ("bos", "eos", "padding")}
    assert ids == {"bos": 257, "eos": 258, "padding": 257 + 255}
    # The release's code puts no BOS in front; its template does not either.
    assert kv["tokenizer.ggml.add_bos_token"] is False
    assert kv["tokenizer.chat_template"] == "{{ messages[0]['content'] }}"


def test_reserved_ids_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    """As in the release: 163,584 ranks and 258 more, but 163,840 rows."""
    source = as_kimi(tmp_path, small())
    with Checkpoint(source) as checkpoint:
        kv = vocabulary(checkpoint, 512)
        tokens = kv["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        assert (len(tokens), tokens[-1]) == (512, "[PAD]")
        with pytest.raises(ConversionError, match=r"token id 511, but the embedding has 511 rows"):
            vocabulary(checkpoint, 511)


@pytest.fixture(scope="module")
def trained() -> dict[bytes, int]:
    return kimi_ranks(lines(), N_RANKS)


def encoding(ranks: dict[bytes, int]) -> Any:
    import tiktoken as reference

    return reference.Encoding(
        "kimi", pat_str="|".join(tiktoken.EXPRESSIONS), mergeable_ranks=ranks, special_tokens={}
    )


def test_merges_make_what_ranks_make(tmp_path: Path, trained: dict[bytes, int]) -> None:
    """Every token of a trained vocabulary has its pair, and the pairs' product is the token."""
    found = merges(tmp_path, trained)
    in_order = sorted((t for t in trained if len(t) > 1), key=trained.__getitem__)
    assert [as_bytes(m.replace(" ", "")) for m in found] == in_order


@pytest.mark.native
def test_ids_are_tiktokens(tmp_path: Path, trained: dict[bytes, int]) -> None:
    from gguf_mtp.llama import Model

    convert(as_kimi(tmp_path, trained), tmp_path / "o.gguf", ConvertOptions("q4_0", n_threads=1))
    theirs = encoding(trained)
    texts = {True: 0, False: 0}
    wrong = {True: 0, False: 0}  # by whether the line has a combining mark
    with Model(str(tmp_path / "o.gguf")) as model:
        for line in lines():
            ids = model.vocab.tokenize(line, add_special=False)
            marked = any(unicodedata.category(c).startswith("M") for c in line)
            texts[marked] += 1
            wrong[marked] += ids != theirs.encode(line, disallowed_special=())
        first = len(trained)
        ids = model.vocab.tokenize("<|im_system|>a<|im_end|>", add_special=True)
        assert (ids[0], ids[-1]) == (first + 10, first + 2)
        assert model.vocab.end_tokens >= {first + 1, first + 2}
        assert not model.vocab.adds_bos
    print(wrong, "of", texts)
    assert texts[False] > 1500
    assert wrong[False] == 0
    # llama.cpp's kimi-k2 splits words at their marks, which the release's expressions do not.
    # When it no longer does, docs/MODELS.md is to be changed.
    assert wrong[True] > 0


def no_line(folder: Path) -> None:
    path = folder / "tiktoken.model"
    path.write_text(path.read_text().replace("IQ== 33\n", "IQ=! 33\n"))


def no_rank(folder: Path) -> None:
    path = folder / "tiktoken.model"
    path.write_text(path.read_text().replace("IQ== 33\n", "IQ==\n"))


def twice(folder: Path) -> None:
    path = folder / "tiktoken.model"
    path.write_text(path.read_text() + "IQ== 300\n")


def gap(folder: Path) -> None:
    path = folder / "tiktoken.model"
    path.write_text(path.read_text() + "YWI= 300\n")


def no_byte(folder: Path) -> None:
    path = folder / "tiktoken.model"
    path.write_text("IQ== 0\n")


def other_words(folder: Path) -> None:
    path = folder / "tokenization_kimi.py"
    path.write_text(path.read_text().replace("{1,3}", "{1,2}"))


def not_python(folder: Path) -> None:
    (folder / "tokenization_kimi.py").write_text("class :")


def no_code(folder: Path) -> None:
    (folder / "tokenization_kimi.py").unlink()


def no_names(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")


def bad_name(folder: Path) -> None:
    named = {"added_tokens_decoder": {"33": {"content": "[BOS]"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_line, r"tiktoken\.model, line 34: 'IQ=! 33' is not a token in base64 and its rank"),
        (no_rank, r"tiktoken\.model, line 34: 'IQ==' is not a token"),
        (twice, r"tiktoken\.model, line 257: the token b'!' occurs twice"),
        (gap, r"b'ab' has rank 300, but the next rank after 255 must be 256"),
        (no_byte, r"the single byte 0x00 is not a token"),
        (other_words, r"tokenization_kimi\.py: its split expressions differ from Kimi-K2's"),
        (not_python, r"tokenization_kimi\.py is not Python"),
        (no_code, r"tokenization_kimi\.py is missing: it defines how text is split"),
        (no_names, r"tokenizer_config\.json has no added_tokens_decoder"),
        (
            bad_name,
            r"added_tokens_decoder has '33': '\[BOS\]', but must map ids from 256 on to texts",
        ),
    ],
)
def test_malformed_files(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    source = as_kimi(tmp_path, small())
    assert kv_of(source)["tokenizer.ggml.merges"] == []
    change(source)
    with pytest.raises(ConversionError, match=says):
        kv_of(source)


def test_neither_file(tmp_path: Path) -> None:
    source = as_kimi(tmp_path, small())
    (source / "tiktoken.model").unlink()
    with pytest.raises(ConversionError, match=r"tokenizer\.json is missing \(and so is tiktoken"):
        kv_of(source)
