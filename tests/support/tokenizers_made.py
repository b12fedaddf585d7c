"""Tokenizers made in a test: V2-Lite's steps and Kimi's files over freshly trained vocabularies."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gguf_mtp.converters import pretokenizers
from gguf_mtp.converters.byte_level import as_bytes
from gguf_mtp.converters.tiktoken import CODE, EXPRESSIONS, FILE

LITE_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
# Bytes that UTF-8 never has: the release spells them as added tokens that are not special, so that
# text with these letters makes them, in its own library and in llama.cpp.
LITE_LETTERS = ("ø", "ö", "ú", "ÿ", "õ", "÷", "û", "ý", "À", "ù", "Á", "þ", "ü")


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def lite_steps() -> dict[str, Any]:
    """The pre-tokenizer as V2-Lite's tokenizer.json has it."""
    names = {name: steps for steps, name in pretokenizers.KNOWN.items()}
    *splits, digits = names["deepseek-llm"]
    assert digits == "Digits"
    ends = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {"type": "Sequence", "pretokenizers": [split(s) for s in splits] + ends}


def _trained(
    pre: Any, lines: Iterable[str], n_vocab: int, without: Iterable[str] = ()
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def lite_tokenizer(lines: Iterable[str], n_vocab: int) -> dict[str, Any]:
    """A tokenizer.json with V2-Lite's pre-tokenizer, trained on `lines`."""
    empty = Tokenizer(models.BPE())
    made: dict[str, Any] = json.loads(empty.to_str()) | {"pre_tokenizer": lite_steps()}
    steps = Tokenizer.from_str(json.dumps(made)).pre_tokenizer
    made = json.loads(_trained(steps, lines, n_vocab, LITE_LETTERS).to_str())
    texts = [(t, True) for t in LITE_SPECIAL] + [(t, False) for t in LITE_LETTERS]
    first = len(made["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made["added_tokens"] = [
        {"id": first + i, "content": text, "special": special} | flags
        for i, (text, special) in enumerate(texts)
    ]
    return made


def write_lite(folder: Path, lines: Iterable[str], n_vocab: int) -> None:
    """V2-Lite's tokenizer files in a checkpoint's folder."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(lite_tokenizer(lines, n_vocab)), encoding="utf-8")
    bos, eos = LITE_SPECIAL
    config = {"add_bos_token": True, "add_eos_token": False, "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# Kimi's release: names of the ids after the ranks, by their distance from the first.
KIMI_NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    9: "[EOT]", 10: "<|im_system|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip


def kimi_ranks(lines: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Ranks as tiktoken has them: every byte, then what was merged, in the order of merging."""
    # The tokenizers library has no set intersection: lookaheads exclude Han instead.
    plain = "|".join(EXPRESSIONS)
    for upper in (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}"):
        plain = plain.replace(rf"{upper}&&[^\p{{Han}}]]", rf"(?:(?!\p{{Han}}){upper}])")
    steps = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(plain), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    vocabulary = _trained(steps, lines, n_ranks).get_vocab()
    return {as_bytes(token): rank for token, rank in vocabulary.items()}


def write_kimi(folder: Path, ranks: dict[bytes, int]) -> None:
    """tiktoken.model, the code that says how text is split, and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    rows = sorted(ranks.items(), key=lambda item: item[1])
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in rows)
    (folder / FILE).write_text(text)
    strings = "\n".join(f'        r"""{e}""",' for e in EXPRESSIONS)
    (folder / CODE).write_text(
        f'class TikTokenTokenizer:\n    pat_str = "|".join([\n{strings}\n    ])\n'
    )
    n = len(ranks)
    config = {
        "added_tokens_decoder": {
            str(n + i): {"content": text, "special": True} for i, text in KIMI_NAMED.items()
        },
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer", "chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
