from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_mtp.errors import LoadFailed, ModelError
from gguf_mtp.gguf import model_facts
from gguf_mtp.gguf.ggml_types import TENSOR_TYPES
from gguf_mtp.gguf.header import read_header
from tests.support.gguf_files import Model, bent, header, tensor, text, value

Change = Callable[[Model], object]


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return Model().write(tmp_path / "sound.gguf")


# -- what a sound file says ----------------------------------------------------------------------


def test_facts_of_a_sound_file(sound: Path) -> None:
    facts = model_facts.read(sound)
    assert (facts.architecture, facts.name, facts.path) == ("deepseek2", "tiny", str(sound))
    assert (facts.n_layer, facts.n_mtp) == (2, 1)  # block_count 3 counts the MTP block
    assert (facts.n_embd, facts.n_vocab, facts.context_length) == (32, 300, 256)
    assert (facts.n_expert, facts.n_expert_used) == (4, 2)
    assert facts.can_draft
    assert facts.reason == "blk.2 is an MTP block that llama.cpp can run"
    assert facts.kv["deepseek2.expert_weights_scale"] == 1.5
    assert facts.kv["tokenizer.ggml.tokens"] == 300  # of the vocabulary the length only


def test_tensors_stand_where_the_header_says(sound: Path) -> None:
    raw = bytearray(sound.read_bytes())
    place = next(
        t for t in model_facts.read(sound).tensors if t.name == "blk.1.ffn_gate_exps.weight"
    )
    assert (place.shape, place.type, place.n_bytes) == ((32, 20, 4), "F32", 4 * 32 * 20 * 4)
    marker = struct.pack("<f", 3.5)
    raw[place.offset : place.offset + 4] = marker
    sound.write_bytes(raw)
    gguf = pytest.importorskip("gguf")
    found = {t.name: t.data for t in gguf.GGUFReader(sound).tensors}  # another implementation
    assert found[place.name].flat[0] == 3.5


@pytest.mark.parametrize("n_padding", range(32))
def test_the_data_begins_at_the_next_multiple_of_32(n_padding: int, tmp_path: Path) -> None:
    numbers = struct.pack("<IIQ2000I", 9, 4, 2000, *range(2000))  # skipped, not read
    kv = {"a.pad": value("x" * n_padding), "a.long": numbers}
    raw = header(kv, [tensor("t", (8,))])
    start = len(raw) + -len(raw) % 32
    (tmp_path / "m.gguf").write_bytes(raw.ljust(start + 32, b"\0"))
    assert [t.offset for t in read_header(tmp_path / "m.gguf").tensors] == [start]


def test_summary_counts_bytes_by_part_and_type(tmp_path: Path) -> None:
    path = bent(tmp_path / "q8.gguf", lambda m: m.types.update({"output.weight": 8}))
    summary = model_facts.summary(model_facts.read(path))
    assert summary["tensors"]["output"] == {"Q8_0": 300 * 34}
    assert summary["tensors"]["embedding"] == {"F32": 300 * 32 * 4}
    assert summary["tensors"]["router"] == {"F32": (32 * 4 + 4) * 4}
    assert summary["tensors"]["dense ffn"] == {"F32": 3 * 32 * 64 * 4}
    mtp = sum(t.n_bytes for t in model_facts.read(path).tensors if t.name.startswith("blk.2."))
    assert summary["tensors"]["mtp"] == {"F32": mtp}
    everything = sum(sum(types.values()) for types in summary["tensors"].values())
    assert everything == sum(t.n_bytes for t in model_facts.read(path).tensors)
    assert summary["file_bytes"] == path.stat().st_size


def test_a_file_without_an_mtp_block_runs_plain(tmp_path: Path) -> None:
    def trunk_only(model: Model) -> None:
        model.hyper |= {"block_count": 2, "nextn_predict_layers": 0}
        model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith("blk.2.")}

    facts = model_facts.read(bent(tmp_path / "trunk.gguf", trunk_only))
    assert (facts.n_layer, facts.n_mtp, facts.can_draft) == (2, 0, False)
    assert facts.reason == "the file has no MTP block"


def test_long_arrays_keep_their_length_and_short_ones_their_values(tmp_path: Path) -> None:
    extra = {"a.short": [1, 2, 3], "a.long": list(range(2000)), "a.words": ["x", "y"]}
    facts = model_facts.read(bent(tmp_path / "m.gguf", lambda m: m.extra.update(extra)))
    assert facts.kv["a.short"] == [1, 2, 3]
    assert facts.kv["a.words"] == ["x", "y"]
    assert facts.kv["a.long"] == 2000


# -- what llama.cpp would abort on ---------------------------------------------------------------


def hyper(**changes: object) -> Change:
    return lambda m: m.hyper.update({k.replace("__", "."): v for k, v in changes.items()})


def kinds(name: str, kind: int) -> Change:
    return lambda m: m.types.update({name: kind})


def without(*names: str) -> Change:
    def drop(model: Model) -> None:
        for name in names:
            del model.shapes[name]

    return drop


def mtp_only(model: Model) -> None:
    model.shapes = {n: s for n, s in model.shapes.items() if not n.startswith(("blk.0.", "blk.1."))}


def odd_rope(model: Model) -> None:
    model.hyper |= {"rope.dimension_count": 7, "attention.key_length": 31}
    for name in [n for n in model.shapes if "attn_kv_a_mqa" in n]:
        model.shapes[name] = (32, 31)
    for name in [n for n in model.shapes if "attn_k_b" in n]:
        model.shapes[name] = (9, 24, 2)


def two_mtp_blocks(model: Model) -> None:
    model.hyper |= {"block_count": 4, "nextn_predict_layers": 2}
    block = {n: s for n, s in model.shapes.items() if n.startswith("blk.2.")}
    model.shapes |= {name.replace("blk.2.", "blk.3."): shape for name, shape in block.items()}


def unsplit(model: Model) -> None:
    model.hyper |= {"attention.head_count_kv": 2, "attention.key_length": 16}
    model.hyper |= {"attention.value_length": 12}
    del model.hyper["attention.key_length_mla"], model.hyper["attention.value_length_mla"]
    for index in range(3):
        del (
            model.shapes[f"blk.{index}.attn_k_b.weight"],
            model.shapes[f"blk.{index}.attn_v_b.weight"],
        )
        model.shapes[f"blk.{index}.attn_kv_b.weight"] = (24, 2 * (8 + 12))


def dense(model: Model) -> None:
    model.hyper["leading_dense_block_count"] = 3
    ffn = {n: s for n, s in model.shapes.items() if re.match(r"blk.0.ffn_(gate|up|down).w", n)}
    for index in (1, 2):
        for name in [n for n in model.shapes if re.match(rf"blk.{index}.(ffn_[gud]|exp)", n)]:
            del model.shapes[name]
        model.shapes |= {name.replace("blk.0", f"blk.{index}"): s for name, s in ffn.items()}


def fused(model: Model) -> None:
    """Gate and up in one tensor, as llama.cpp takes them too."""
    for index in (1, 2):
        without(*(f"blk.{index}.ffn_{part}_exps.weight" for part in ("gate", "up")))(model)
        model.shapes[f"blk.{index}.ffn_gate_up_exps.weight"] = (32, 40, 4)


def lite(model: Model) -> None:
    """26 layers and the MTP block, without low-rank queries."""
    model.hyper["block_count"] = 27
    one = {n: s for n, s in model.shapes.items() if n.startswith("blk.1.")}
    mtp = {n: s for n, s in model.shapes.items() if n.startswith("blk.2.")}
    for name in mtp:
        del model.shapes[name]
    for index in range(2, 26):
        model.shapes |= {name.replace("blk.1.", f"blk.{index}."): s for name, s in one.items()}
    model.shapes |= {name.replace("blk.2.", "blk.26."): s for name, s in mtp.items()}
    for name in [n for n in model.shapes if "attn_q_" in n]:
        del model.shapes[name]
    model.shapes |= {f"blk.{index}.attn_q.weight": (32, 32) for index in range(27)}


def epsilon(value: float) -> Change:
    return lambda model: model.hyper.__setitem__("attention.layer_norm_rms_epsilon", value)


ABORTS: dict[str, tuple[Change, str]] = {
    "no blocks": (hyper(block_count=0), "0 blocks"),
    "too many blocks": (hyper(block_count=513), "513 blocks"),
    "more MTP blocks than blocks": (hyper(nextn_predict_layers=4), "declares 4 MTP blocks"),
    "only MTP blocks": (hyper(nextn_predict_layers=3), "declares 3 MTP blocks"),
    "unknown RoPE scaling": (hyper(rope__scaling__type="warped"), "'warped'"),
    "too many experts": (hyper(expert_count=1025), "1025 experts"),
    "more experts used than there are": (hyper(expert_used_count=5), "uses 5 of 4"),
    "no expert used": (hyper(expert_used_count=0), "uses 0 of 4"),
    "as many groups as experts": (hyper(expert_group_count=4), "4 expert groups, but only 4"),
    "groups that do not divide": (hyper(expert_group_count=3), "do not divide into 3"),
    "all groups used": (hyper(expert_group_used_count=2), "2 of 2 expert groups"),
    "unknown gating function": (hyper(expert_gating_func=9), "gating function is 9"),
    "RoPE wider than a head": (hyper(rope__dimension_count=16), "16 of the 16"),
    "RoPE on an odd number": (odd_rope, "its rope.dimension_count is 7"),
    "two cached heads": (hyper(attention__head_count_kv=2), "2 keys of 32 values"),
    "a cached head too narrow": (hyper(attention__key_length=16), "1 keys of 16 values"),
    "half-precision norm": (kinds("blk.1.attn_norm.weight", 1), "blk.1.attn_norm.weight is F16"),
    "integer matrix": (kinds("blk.1.attn_output.weight", 26), "attn_output.weight is I32"),
    "integer embedding": (kinds("token_embd.weight", 26), "token_embd.weight is I32"),
    "double head": (kinds("output.weight", 28), "output.weight is F64"),
    "half-precision bias": (kinds("blk.1.exp_probs_b.bias", 1), "exp_probs_b.bias is F16"),
    "a negative epsilon": (epsilon(-1.0), "layer_norm_rms_epsilon is -1.0"),
    "no epsilon at all": (epsilon(math.nan), "layer_norm_rms_epsilon is nan"),
    "temperature without its length": (hyper(attention__temperature_scale=0.1), "temperature"),
    "MTP block alone": (mtp_only, "without the rest of the model"),
    "tokens equal up to a NUL": (lambda m: m.tokens.__setitem__(299, "<w0>\0x"), "token 299"),
    "two equal tokens": (lambda m: m.tokens.__setitem__(299, "<w0>"), "token 299"),
}
NO_DRAFT: dict[str, tuple[Change, str]] = {
    "two MTP blocks": (two_mtp_blocks, "2 MTP blocks, but llama.cpp drafts with exactly one"),
    "unsplit key and value": (unsplit, "not split (blk.2.attn_kv_b.weight)"),
    "lite": (lite, "26 layers as a lite model"),
    "dense MTP block": (dense, "blk.2 must have experts, but is a dense layer"),
    "temperature scale": (
        hyper(attention__temperature_scale=0.1, attention__temperature_length=64),
        "temperature",
    ),
    "no tensors of the block": (
        lambda m: without(*[n for n in m.shapes if n.startswith("blk.2.")])(m),
        "blk.2.nextn.eh_proj.weight is missing",
    ),
}
# The loader fails on these, for a plain run too: half a block is worse than none.
HALF_A_BLOCK: dict[str, tuple[Change, str]] = {
    "no shared expert": (without("blk.2.ffn_up_shexp.weight"), "ffn_up_shexp.weight is missing"),
    "no hidden norm": (without("blk.2.nextn.hnorm.weight"), "nextn.hnorm.weight is missing"),
    "a projection of another width": (
        lambda m: m.shapes.update({"blk.2.nextn.eh_proj.weight": (32, 32)}),
        "blk.2.nextn.eh_proj.weight is 32 x 32, but must be 64 x 32",
    ),
    "a head of another vocabulary": (
        lambda m: m.shapes.update({"blk.2.nextn.shared_head_head.weight": (32, 299)}),
        "blk.2.nextn.shared_head_head.weight is 32 x 299, but must be 32 x 300",
    ),
}


# Other architectures' graphs abort on these, or compute no numbers.
SENSELESS: dict[str, tuple[Change, str]] = {
    "an endless epsilon": (epsilon(math.inf), "layer_norm_rms_epsilon is inf"),
    "no layer has attention": (hyper(full_attention_interval=0), "full_attention_interval is 0"),
}
REFUSED = ABORTS | HALF_A_BLOCK | SENSELESS


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_cannot_run_is_refused_in_words(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        model_facts.read(bent(tmp_path / "bent.gguf", change))
    assert "bent.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_formats_of_another_engine_are_refused_by_name(tmp_path: Path) -> None:
    path = bent(tmp_path / "ds4.gguf", lambda m: setattr(m, "arch", "deepseek4-dspark"))
    with pytest.raises(ModelError, match=r"a DSpark drafter of the ds4 engine \(deepseek4-dspark"):
        model_facts.read(path)


@pytest.mark.parametrize("name", NO_DRAFT)
def test_what_aborts_the_mtp_graph_does_not_draft(name: str, tmp_path: Path) -> None:
    change, words = NO_DRAFT[name]
    facts = model_facts.read(bent(tmp_path / "bent.gguf", change))
    assert not facts.can_draft
    assert words in facts.reason


CHILD = """
import ctypes, sys, llama_cpp as L
from llama_cpp import llama_cpp_ext as X
path, use_mtp = sys.argv[1].encode(), sys.argv[2] == "mtp"
params = L.llama_model_default_params()
params.load_mtp = use_mtp
model = L.llama_model_load_from_file(path, params)
if not model:
    sys.exit(3)
for kind in (0, 1) if use_mtp else (0,):
    ctx_params = L.llama_context_default_params()
    ctx_params.n_ctx, ctx_params.ctx_type, ctx_params.n_threads = 256, kind, 1
    ctx = L.llama_init_from_model(model, ctx_params)
    if not ctx:
        sys.exit(4)
    X.llama_set_embeddings_nextn(ctx, True, False)
    batch = L.llama_batch_init(2, 32 if kind else 0, 1)
    if kind:
        tokens = (L.llama_token * 2)()
        batch.token = tokens
    batch.n_tokens = 2
    for i in range(2):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5, i + kind, 1, 1
        batch.seq_id[i][0] = 0
    if L.llama_decode(ctx, batch) != 0:
        sys.exit(5)
"""


def run_in_child(path: Path, mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), mode],
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # its backtrace waits for a debugger
    )
    return done.returncode


@pytest.mark.native
@pytest.mark.parametrize("change", [hyper(), fused], ids=["split", "fused"])
@pytest.mark.parametrize("mode", ["plain", "mtp"])
def test_sound_files_run(mode: str, change: Change, tmp_path: Path) -> None:
    path = bent(tmp_path / "sound.gguf", change)
    assert model_facts.read(path).can_draft
    assert run_in_child(path, mode) == 0


@pytest.mark.native
@pytest.mark.parametrize("name", ABORTS)
def test_the_refusal_is_needed(name: str, tmp_path: Path) -> None:
    assert run_in_child(bent(tmp_path / "bent.gguf", ABORTS[name][0]), "plain") < 0


@pytest.mark.native
@pytest.mark.parametrize("name", NO_DRAFT)
def test_the_obstacle_is_one_and_a_plain_run_is_not_harmed(name: str, tmp_path: Path) -> None:
    path = bent(tmp_path / "bent.gguf", NO_DRAFT[name][0])
    assert run_in_child(path, "mtp") < 0
    assert run_in_child(path, "plain") == 0


@pytest.mark.native
@pytest.mark.parametrize("name", HALF_A_BLOCK)
@pytest.mark.parametrize("mode", ["plain", "mtp"])
def test_the_loader_fails_on_half_a_block(mode: str, name: str, tmp_path: Path) -> None:
    assert run_in_child(bent(tmp_path / "bent.gguf", HALF_A_BLOCK[name][0]), mode) == 3


@pytest.mark.native
def test_block_sizes_are_the_librarys() -> None:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_type_name.restype = ctypes.c_char_p
    for number, of in TENSOR_TYPES.items():
        found = library.ggml_type_name(number).decode().upper()
        assert found == of.name
        assert (library.ggml_blck_size(number), library.ggml_type_size(number)) == of[1:]


# -- files that are not what they say ------------------------------------------------------------


def whole(kv: dict[str, bytes], tensors: list[bytes], data: int = 4096) -> bytes:
    raw = header({"general.architecture": value("deepseek2")} | kv, tensors)
    return raw + bytes(-len(raw) % 32 + data)


def announced(n_tensors: int, n_kv: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_kv) + bytes(64)


ONE = tensor("a", (32,))
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "two bytes": (b"GG", "is not a GGUF file"),
    "magic alone": (b"GGUF", "cut short"),
    "random bytes": (bytes(range(7, 250)), "is not a GGUF file (its first bytes are 07 08 09 0a)"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "web page": (b"<!doctype html><html>", "a web page"),
    "zip archive": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, no longer supported"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4, newer than this release"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^60 tensors": (announced(1 << 60, 0), "expected 1152921504606846976 tensors"),
    "2^60 values": (announced(0, 1 << 60), "expected 1152921504606846976 metadata values"),
    "2^64 - 1 values": (announced(0, (1 << 64) - 1), "metadata values at byte"),
    "a text past the end": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40) + bytes(64),
        "string of 1099511627776 bytes",
    ),
    "2^60 strings": (
        whole({"a": struct.pack("<IIQ", 9, 8, 1 << 60)}, []),
        "expected 1152921504606846976 strings in a",
    ),
    "2^60 numbers": (
        whole({"a": struct.pack("<IIQ", 9, 4, 1 << 60)}, []),
        "expected 1152921504606846976 values in a",
    ),
    "numbers past the end": (
        whole({"a": struct.pack("<IIQ", 9, 4, 2000)}, [], data=4096),
        "expected 2000 values in a",
    ),
    "an array of arrays": (whole({"a": struct.pack("<IIQ", 9, 9, 1)}, []), "value type 9"),
    "unknown value type": (whole({"a": struct.pack("<IQ", 77, 0)}, []), "value type 77"),
    "an empty key": (whole({"": value(1)}, []), "key is empty"),
    "odd alignment": (whole({"general.alignment": value(24)}, [ONE]), "is 24, but must be a power"),
    "no alignment": (whole({"general.alignment": value(0)}, [ONE]), "is 0, but must be a power"),
    "alignment in words": (whole({"general.alignment": value("32")}, [ONE]), "is '32', but must"),
    "two equal names": (
        whole({}, [ONE, tensor("a", (32,), offset=128)]),
        "two tensors are named 'a'",
    ),
    "overlap": (whole({}, [ONE, tensor("b", (32,), offset=64)]), "it overlaps the previous tensor"),
    "a gap": (whole({}, [ONE, tensor("b", (32,), offset=256)]), "it leaves a gap"),
    "misaligned": (whole({}, [ONE, tensor("b", (32,), offset=129)]), "it leaves a gap"),
    "unknown tensor type": (whole({}, [tensor("a", (32,), kind=31)]), "has the unknown type 31"),
    "half a block": (whole({}, [tensor("a", (33,), kind=8)]), "needs multiples of 32"),
    "five dimensions": (whole({}, [tensor("a", (1,) * 5)]), "has 5 dimensions"),
    "a million dimensions": (
        whole({}, [text("a") + struct.pack("<I", 1_000_000)]),
        "has 1000000 dimensions",
    ),
    "a shape that wraps around 2^64": (
        whole({}, [tensor("a", (4194305, 4194305, 211106198978564))]),
        "is cut short: tensor 'a' needs",
    ),
    "a long name": (whole({}, [tensor("a" * 64, (32,))]), "longer than 63 bytes"),
    "data cut short": (whole({}, [tensor("a", (2048,))]), "cut short: tensor 'a'"),
    "no architecture": (header({}, []) + bytes(32), "does not name its architecture"),
    "architecture is a number": (header({"general.architecture": value(3)}, []), "does not name"),
    "vocabulary only": (whole({}, []), "vocabulary without a model"),
    "a projector": (header({"general.architecture": value("clip")}, []), "not a language model"),
    "an adapter": (whole({"general.type": value("adapter")}, [ONE]), "'adapter'"),
    "no hyperparameters": (whole({}, [ONE]), "lacks deepseek2.block_count"),
    "blocks in words": (
        whole({"deepseek2.block_count": value("three")}, [ONE]),
        "deepseek2.block_count is 'three', but must be a whole number",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    raw, words = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        model_facts.read(path)
    assert "bad.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + value(1))
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(LoadFailed, match="'a' appears twice"):
        model_facts.read(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="a folder, but must be a GGUF file"):
        model_facts.read(tmp_path)
    with pytest.raises(LoadFailed, match=r"cannot read .*absent\.gguf: No such file"):
        model_facts.read(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(LoadFailed, match="not a regular file"):
        model_facts.read(tmp_path / "pipe.gguf")
    with pytest.raises(LoadFailed, match="cannot read"):
        model_facts.read("a\0b.gguf")


def test_a_file_without_permission(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(LoadFailed, match=r"cannot read .*sound\.gguf: Permission denied"):
        model_facts.read(sound)


# -- shards --------------------------------------------------------------------------------------


def split(folder: Path, n_tensors: int = 2) -> list[Path]:
    """The header of a model in two shards, one tensor each."""
    paths = [folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for index, path in enumerate(paths):
        kv = {
            "split.no": value(index, 2),
            "split.count": value(2, 2),
            "split.tensors.count": value(n_tensors, 5),
        }
        path.write_bytes(whole(kv, [tensor(f"t{index}", (8, index + 1))]))
    return paths


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    tensors = read_header(first).tensors
    assert [(t.name, t.n_bytes, t.file) for t in tensors] == [
        ("t0", 32, str(first)),
        ("t1", 64, str(second)),
    ]


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    with pytest.raises(LoadFailed, match=r"load m-00001-of-00002\.gguf instead"):
        read_header(second)
    renamed = first.rename(tmp_path / "m.gguf")
    with pytest.raises(LoadFailed, match=r"not named NAME-00001-of-00002\.gguf"):
        read_header(renamed)
    renamed.rename(first)
    raw = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(LoadFailed, match=r"should be shard 2 of 2, but .* says shard 1"):
        read_header(first)
    second.write_bytes(raw[:100])
    with pytest.raises(LoadFailed, match=r"m-00002-of-00002\.gguf is damaged or cut short"):
        read_header(first)
    second.unlink()
    with pytest.raises(LoadFailed, match=r"cannot read .*m-00002-of-00002\.gguf: No such file"):
        read_header(first)


def test_shards_with_too_few_tensors(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="hold 2 tensors, but its header says 3"):
        read_header(split(tmp_path, n_tensors=3)[0])


# -- damage at random ----------------------------------------------------------------------------

with tempfile.TemporaryDirectory() as _folder:
    SOUND = Model().write(Path(_folder) / "m.gguf").read_bytes()
END_OF_HEADER = SOUND.rindex(b"shared_head_norm.weight") + 64


def read_bytes(raw: bytes, folder: Path) -> None:
    path = folder / "damaged.gguf"
    path.write_bytes(raw)
    model_facts.read(path)


@settings(max_examples=100, deadline=2000)
@given(end=st.integers(0, len(SOUND) - 1))
def test_every_truncation_is_refused(end: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ModelError):
        read_bytes(SOUND[:end], Path(folder))


@settings(max_examples=300, deadline=2000)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, END_OF_HEADER), st.integers(0, 255)), min_size=1, max_size=8
    )
)
def test_flipped_bytes_end_in_a_model_error_or_in_facts(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(SOUND)
    for place, byte in changes:
        raw[place] = byte
    tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            read_bytes(bytes(raw), Path(folder))
    except ModelError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 << 20


def test_a_checkpoint_s_folder_says_how_to_convert_it(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"is a folder, but must be a GGUF file$"):
        model_facts.read(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(LoadFailed, match=f"`gguf-mtp convert {tmp_path}` makes one"):
        model_facts.read(tmp_path)
