"""A checkpoint's tokenizer -> GGUF vocabulary: tokenizer.json, or Kimi's tiktoken.model.

Entries up to the embedding's rows are padded, the chat template is taken verbatim, and whether BOS
is added is always said.

It knows nothing of tensors, and nothing of how text is split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import ConversionError
from . import tiktoken
from .checkpoint import Checkpoint, read_text
from .pretokenizers import recognise
from .tensors import Value
from .tokenizer_files import TokenizerConfig, TokenizerJson, check

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's token types


class _Read(NamedTuple):
    """`known` maps ids to text and type; `adds_bos` is what holds when no key says it."""

    pre: str
    known: dict[int, tuple[str, int]]
    merges: list[str]
    adds_bos: bool


def vocabulary(checkpoint: Checkpoint, n_vocab: int) -> dict[str, Value]:
    """`tokenizer.*` metadata with `n_vocab` entries, the embedding's rows.

    Raises `ConversionError` for a tokenizer that llama.cpp could not reproduce.
    """
    file = "tokenizer_config.json"
    config = check(file, TokenizerConfig, checkpoint.json(file) or {})
    read = _read(checkpoint, config, n_vocab)
    entries = [read.known.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(n_vocab)]
    tokens = [token for token, _ in entries]
    kv: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": read.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [type_ for _, type_ in entries],
        "tokenizer.ggml.merges": read.merges,
    }
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if ids.setdefault(token, i) != i:  # the run time asserts, which ends the process
            raise ConversionError(f"the tokenizer gives {token!r} two ids, {ids[token]} and {i}")
    for key, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        id_ = _special(checkpoint, config, field, ids)
        if id_ is not None:
            kv[f"tokenizer.ggml.{key}_token_id"] = id_
    kv |= _more_ends(checkpoint, n_vocab, kv.get("tokenizer.ggml.eos_token_id"))
    adds_bos = read.adds_bos and "tokenizer.ggml.bos_token_id" in kv
    kv["tokenizer.ggml.add_bos_token"] = bool(config.get("add_bos_token", adds_bos))
    kv["tokenizer.ggml.add_eos_token"] = bool(config.get("add_eos_token", False))
    return kv | _templates(checkpoint, config)


def _read(checkpoint: Checkpoint, config: dict[str, Any], n_vocab: int) -> _Read:
    tokenizer = checkpoint.json("tokenizer.json")
    if tokenizer is not None:
        check("tokenizer.json", TokenizerJson, tokenizer)
        pre = recognise(tokenizer)
        return _Read(pre, _entries(tokenizer, n_vocab), _merges(tokenizer), True)
    if not (checkpoint.folder / tiktoken.FILE).exists():
        raise ConversionError(
            f"{checkpoint.folder / 'tokenizer.json'} is missing (and so is {tiktoken.FILE})"
        )
    read = tiktoken.read(checkpoint.folder, config)
    known = {i: (token, _NORMAL) for i, token in enumerate(read.tokens)}
    named = config["added_tokens_decoder"]
    _check_room(max([len(known) - 1, *map(int, named)]), n_vocab, tiktoken.FILE)
    known |= {i: (text, _CONTROL) for i, text in read.special.items()}
    return _Read("kimi-k2", known, read.merges, False)


def _entries(tokenizer: dict[str, Any], n_vocab: int) -> dict[int, tuple[str, int]]:
    known: dict[int, tuple[str, int]] = {
        id_: (token, _NORMAL) for token, id_ in tokenizer["model"].get("vocab", {}).items()
    }
    for added in tokenizer.get("added_tokens") or []:
        text = added["content"]
        # DeepSeek marks its role tokens "not special" though they never are text; llama.cpp's own
        # converter goes by the brackets, and so do the files in circulation.
        control = added.get("special") or (text.startswith("<｜") and text.endswith("｜>"))
        known[added["id"]] = (text, _CONTROL if control else _USER_DEFINED)
    _check_room(max(known, default=-1), n_vocab, "tokenizer.json")
    return known


def _check_room(largest: int, n_vocab: int, file: str) -> None:
    if largest >= n_vocab:
        raise ConversionError(
            f"{file} has the token id {largest}, but the embedding has {n_vocab} rows"
        )


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    merges = tokenizer["model"].get("merges", [])
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _more_ends(checkpoint: Checkpoint, n_vocab: int, eos: Value | None) -> dict[str, Value]:
    """config.json and generation_config.json may list several tokens that end an answer, in any
    order; llama.cpp has two more keys. `eos` is the tokenizer's own."""
    ends: list[int] = []
    generation = checkpoint.json("generation_config.json") or {}
    for file, config in (
        ("config.json", checkpoint.config),
        ("generation_config.json", generation),
    ):
        ids = config.get("eos_token_id")
        if ids is None:
            continue
        for id_ in ids if isinstance(ids, list) else [ids]:
            if type(id_) is not int or not 0 <= id_ < n_vocab:
                raise ConversionError(
                    f"{file}: eos_token_id is {ids!r:.60}, but must be ids below {n_vocab}"
                )
            if id_ != eos and id_ not in ends:
                ends.append(id_)
        if len(ends) > 2:
            raise ConversionError(
                f"{file}: eos_token_id is {ids!r:.60}, but a GGUF file holds at most 3 tokens that "
                "end an answer"
            )
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return dict(zip(keys, ends, strict=False))


def _special(
    checkpoint: Checkpoint, config: dict[str, Any], field: str, ids: dict[str, int]
) -> int | None:
    """The id of a special token: by its text in tokenizer_config.json, else from config.json."""
    token = config.get(f"{field}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        id_ = checkpoint.config.get(f"{field}_token_id")
        id_ = id_[0] if isinstance(id_, list) and id_ else id_
        return id_ if isinstance(id_, int) and 0 <= id_ < len(ids) else None
    if text not in ids:
        raise ConversionError(
            f"tokenizer_config.json: {field}_token {text!r} is not in the vocabulary"
        )
    return ids[text]


def _templates(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Value]:
    key, file = "tokenizer.chat_template", checkpoint.folder / "chat_template.jinja"
    template = read_text(file) if file.exists() else config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {key: template}
    named = {t["name"]: t["template"] for t in template}
    return {key if name == "default" else f"{key}.{name}": text for name, text in named.items()}
