from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo_model import corpus, questions, sources
from bench.demo_model.export import CONFIG, export, to_fp8
from bench.demo_model.model import Config, DemoModel
from bench.demo_model.tokenizer import ASSISTANT, BOS, EOS, USER, train_tokenizer
from bench.demo_model.train import TrainingPlan, batches, held_out_losses, train

LICENCE = "  1 This software and database is being provided to you  \n"
# Lines as WordNet 3.0 has them: offset, file, part, words, pointers | gloss.
DATA = {
    "noun": "02444819 05 n 02 otter 0 sea_otter 0 001 @ 02441942 n 0000 | freshwater mammal with "
    'webbed feet; lives in dens; "the otter swam away"',
    "verb": "02441022 41 v 01 borrow 0 001 @ 02205272 v 0000 01 + 08 00 | get temporarily",
    "adj": "00013887 00 a 01 abundant(p) 0 001 ! 00015247 a 0101 | present in great quantity",
    "adv": '00001740 02 r 01 softly 0 001 ! 00002950 r 0101 | with low volume; "speak softly"',
}
INDEX = {
    "noun": "otter n 2 3 @ ~ #m 2 0 02444819 14765785",
    "verb": "borrow v 1 1 @ 1 1 02441022",
    "adj": "abundant a 1 1 ! 1 1 00013887",
    "adv": "softly r 1 1 ! 1 1 00001740",
}
COUNTS = (
    "otter%1:05:00:: 1 7\nborrow%2:40:00:: 1 12\nabundant%3:00:00:: 1 1\notter%1:27:00:: 2 99\n"
)
FRANCE = {
    "Introduction": {"Background": {"text": "<p>France &amp; others</p>"}},
    "Geography": {"Location": {"text": "Western Europe,  bordering Spain"}},
    "Government": {
        "Country name": {"conventional short form": {"text": "France"}},
        "Capital": {"name": {"text": "Paris ++ more"}},
    },
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices: more threads only wait for each other."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def places(tmp_path: Path) -> corpus.Places:
    wordnet, africa, python = tmp_path / "wn", tmp_path / "fb" / "europe", tmp_path / "lib"
    for folder in (wordnet, africa, python, tmp_path / "fb" / "meta"):
        folder.mkdir(parents=True)
    for part, line in DATA.items():
        (wordnet / f"data.{part}").write_text(LICENCE + line + "  \n", encoding="latin-1")
        (wordnet / f"index.{part}").write_text(LICENCE + INDEX[part] + "  \n", encoding="latin-1")
    (wordnet / "cntlist.rev").write_text(COUNTS)
    (africa / "fr.json").write_text(json.dumps(FRANCE))
    (tmp_path / "fb" / "meta" / "x.json").write_text(json.dumps(FRANCE))
    body = "    return [\n" + "        'a line of code',\n" * 4 + "    ]\n"
    functions = [f"def {name}(x):\n{body}" for name in ("first", "second", "_private")]
    (python / "module.py").write_text("import os\n\n\n" + "\n\n".join(functions))
    (python / "test_module.py").write_text(f"def test(x):\n{body}")
    return corpus.Places(wordnet, tmp_path / "fb", python, tmp_path / "out")


# -- sources and questions -----------------------------------------------------------------------


def test_wordnet_senses_become_questions(places: corpus.Places) -> None:
    noun, verb, adj, adv = questions.gloss_questions(sources.senses(places.wordnet))
    assert noun.questions[0] == "What is an otter?"
    assert noun.answer == (
        "An otter is freshwater mammal with webbed feet; lives in dens. "
        'You can also say "sea otter". For example: The otter swam away.'
    )
    assert verb == (
        ("What does it mean to borrow?", 'What does "to borrow" mean?'),
        "To borrow means to get temporarily.",
    )
    assert adj.answer == '"abundant" describes something present in great quantity.'
    assert adv.answer == '"softly" means with low volume.'  # its example is too short


def test_common_senses_are_first_senses_counted_often_enough(places: corpus.Places) -> None:
    def words(min_count: int) -> list[str]:
        return [s.words[0] for s in sources.common_senses(places.wordnet, min_count)]

    assert words(1) == ["otter", "borrow", "abundant"]
    assert words(2) == ["otter", "borrow"]
    assert words(10) == ["borrow"]  # otter's 99 belong to its second sense
    (otter, *_) = questions.word_questions(sources.common_senses(places.wordnet, 2))
    assert otter.answer == (
        "An otter is freshwater mammal with webbed feet. For example: The otter swam away."
    )


def test_factbook_entries_become_questions(places: corpus.Places) -> None:
    facts = list(sources.facts(places.factbook))
    assert facts[0] == ("France", ("Introduction", "Background"), "France & others")
    answers = {qa.questions[0]: qa.answer for qa in questions.country_questions(facts)}
    assert answers == {
        "What is the location of France?": "France lies in Western Europe, bordering Spain.",
        "What is the capital of France?": "The capital of France is Paris.",
    }
    entries = {qa.questions[1]: qa.answer for qa in questions.entry_questions(facts)}
    assert entries["Tell me about capital (name) in France."] == "Paris more"


def test_library_code_becomes_questions(places: corpus.Places) -> None:
    pieces = list(sources.code(places.python, "*.py"))
    assert [piece.name for piece in pieces] == ["first", "second", "_private"]
    (qa, *_) = questions.code_questions(pieces, 80, 700)
    assert qa.questions[0] == "Write the Python function first."
    assert qa.answer.startswith("```python\ndef first(x):\n    return [\n")
    assert qa.answer.endswith("    ]\n```")
    assert not list(questions.code_questions(pieces, 80, len(pieces[0].text)))


# -- the corpus ----------------------------------------------------------------------------------


def material(n: int, n_held: int, n_passes: int = 2) -> corpus.Material:
    group = [questions.Qa((f"q{i}?", f"Q{i}?"), f"answer {i}.") for i in range(n)]
    return corpus.Material([group], [n_held], [None], n_passes, n_small_talk=1)


def test_held_out_answers_are_never_trained_on() -> None:
    training, held = corpus.split(material(20, 5), random.Random(0))
    assert len(held) == 5
    assert {qa.answer for qa in training}.isdisjoint(qa.answer for qa in held)
    assert len(training) == 15
    twice = material(20, 5)
    twice = twice._replace(groups=[[*twice.groups[0], *twice.groups[0]]])  # two ways to an answer
    training, held = corpus.split(twice, random.Random(0))
    assert {qa.answer for qa in training}.isdisjoint(qa.answer for qa in held)
    training, held = corpus.split(material(6, 400), random.Random(0))
    assert (len(training), len(held)) == (3, 3)  # a small source keeps half


def test_every_pass_asks_for_everything_once_in_conversations() -> None:
    source = material(20, 0, n_passes=3)
    training, _ = corpus.split(source, random.Random(0))
    texts = list(corpus.documents(source, training, random.Random(1)))
    assert all(text.startswith(BOS + USER) and text.endswith(EOS) for text in texts)
    assert {text.count(USER) for text in texts} <= {1, 2, 3, 4}
    whole = "".join(texts)
    for qa in training:
        assert whole.count(ASSISTANT + qa.answer + EOS) == 3
    assert whole.count(ASSISTANT + "Goodbye!" + EOS) == 3
    assert whole.count(BOS) == len(texts)
    assert texts != list(corpus.documents(source, training, random.Random(2)))


def test_a_phase_writes_ids_that_decode_to_its_conversations(places: corpus.Places) -> None:
    n_training, n_held = corpus.build("broad", places, n_vocab=320)
    tokenizer = Tokenizer.from_file(str(places.out / "tokenizer.json"))
    ids = np.load(places.out / "broad.npy")
    assert (ids.dtype, len(ids)) == (np.uint16, n_training)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    held = json.loads((places.out / "broad_held.json").read_text(encoding="utf-8"))
    assert len(held) == 2 + 2 + 1  # half of four senses, of four fields, of three functions
    for row in held:
        assert row["answer"] not in text
    asked = tokenizer.decode(
        np.load(places.out / "broad_held.npy").tolist(), skip_special_tokens=False
    )
    first = held[0]
    assert asked.startswith(f"{BOS}{USER}{first['prompt']}{ASSISTANT}{first['answer']}{EOS}{BOS}")
    assert asked.count(BOS) == len(held)
    assert n_held == len(np.load(places.out / "broad_held.npy"))


def test_the_last_phase_never_sees_what_the_one_before_held_out(places: corpus.Places) -> None:
    corpus.build("broad", places, n_vocab=320)
    corpus.build("focused", places)
    held = {r["answer"] for r in json.loads((places.out / "focused_held.json").read_text())}
    groups = corpus.core(places).groups
    answers = {qa.answer for group in groups for qa in group}
    assert held
    assert answers
    assert held.isdisjoint(answers)


def test_the_tokenizer_has_deepseeks_pieces() -> None:
    ours = train_tokenizer(["What is an otter? It swims 12345 times.\n"] * 3, 320)
    demo = Tokenizer.from_file(str(CONFIG.with_name("tokenizer.json")))
    mine, theirs = json.loads(ours.to_str()), json.loads(demo.to_str())
    assert mine["pre_tokenizer"] == theirs["pre_tokenizer"]
    assert mine["decoder"] == theirs["decoder"]
    contents = [token["content"] for token in mine["added_tokens"]]
    assert contents == [token["content"] for token in theirs["added_tokens"]]


# -- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> dict[str, Tensor]:
    """The checked-in demo's weights as float32, without the MTP layer's copies."""
    raw: dict[str, Tensor] = {}
    for shard in sorted(CONFIG.parent.glob("*.safetensors")):
        raw |= load_file(shard)
    weights = {}
    for name, weight in raw.items():
        if name.endswith(("_scale_inv", "6.embed_tokens.weight", "6.shared_head.head.weight")):
            continue
        value, scale = weight.float(), raw.get(name + "_scale_inv")
        if scale is not None:
            rows, cols = value.shape
            value *= scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        weights[name] = value
    return weights


@torch.no_grad()
def test_the_trained_weights_fit_and_answer_and_draft(demo: dict[str, Tensor]) -> None:
    model = DemoModel(Config.load(CONFIG)).eval()
    model.load_state_dict(demo)
    tokenizer = Tokenizer.from_file(str(CONFIG.with_name("tokenizer.json")))
    prompt = f"{BOS}{USER}What is the capital of France?{ASSISTANT}"
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    n_prompt = len(ids)
    while len(ids) < n_prompt + 20 and tokenizer.id_to_token(ids[-1]) != EOS:
        rows = model.hidden(torch.tensor([ids]))
        ids.append(int(model.lm_head(rows)[0, -1].argmax()))
    assert tokenizer.decode(ids[n_prompt:]) == "The capital of France is Paris."
    everything = torch.tensor([ids])
    rows = model.draft(model.hidden(everything)[:, :-1], everything[:, 1:], first=1)
    drafts = model.lm_head(rows)[0].argmax(-1)
    assert drafts[n_prompt - 2 : -1].tolist() == ids[n_prompt:]


@torch.no_grad()
def test_each_loss_looks_at_the_right_token(demo: dict[str, Tensor]) -> None:
    model = DemoModel(Config.load(CONFIG)).eval()
    model.load_state_dict(demo)
    tokenizer = Tokenizer.from_file(str(CONFIG.with_name("tokenizer.json")))
    capitals = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}
    turns = [
        corpus.turn(f"What is the capital of {country}?", f"The capital of {country} is {city}.")
        for country, city in capitals.items()
    ]
    ids = tokenizer.encode(BOS.join(["", *turns]), add_special_tokens=False).ids
    losses = [loss.item() for loss in model.losses(torch.tensor([ids]))]
    assert all(loss < 1 for loss in losses), losses  # above 10 where a row is off by one


def tiny() -> Config:
    """The demo's shape, smaller everywhere."""
    changes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "q_lora_rank": 16}
    changes |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_attention_heads": 2}
    changes |= {"kv_lora_rank": 16, "intermediate_size": 64, "moe_intermediate_size": 16}
    return dataclasses.replace(Config.load(CONFIG), **changes)


@pytest.mark.slow
def test_training_lowers_all_three_losses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DemoModel(tiny())
    data = torch.arange(4000) % 7  # what follows is certain, three tokens ahead too
    plan = TrainingPlan(minutes=1, max_steps=150, continues=True, n_batch=1, n_tokens=32)
    before = held_out_losses(model, data[:200], plan)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert not bias.any()  # measuring moves no bias
    train(model, data, plan, tmp_path / "w.pt")
    after = held_out_losses(model, data[:200], plan)
    assert all(loss > 4 for loss in before)
    assert all(loss < 1 for loss in after), after
    assert bias.any()


def test_windows_hold_the_tokens_that_the_losses_look_at() -> None:
    plan = TrainingPlan(minutes=1, max_steps=1, continues=False, n_batch=3, n_tokens=10)
    for window in itertools.islice(batches(torch.arange(100), plan), 20):
        assert window.shape == (3, 13)
        assert (window.diff() == 1).all()
    with pytest.raises(ValueError, match="13 tokens are too few"):
        next(batches(torch.arange(13), plan))


def test_the_learning_rate_rises_then_falls() -> None:
    fresh = TrainingPlan(minutes=10, max_steps=1000, continues=False)
    assert fresh.rate(0, 0) == pytest.approx(2.5e-5)
    assert fresh.rate(500, 0.2) == pytest.approx(2.5e-3)  # a plateau for a fifth of the time
    assert fresh.rate(999, 1.0) == pytest.approx(0.04 * 2.5e-3)
    again = TrainingPlan(minutes=10, max_steps=1000, continues=True)
    assert again.rate(500, 0.5) == pytest.approx(1.6e-3 * 0.515)
    assert again.progress(100, 480) == pytest.approx(0.8)  # time or steps, whichever is further
    assert again.progress(900, 60) == pytest.approx(0.9)


# -- the export ----------------------------------------------------------------------------------


def test_scales_are_the_blocks_largest_values_also_at_the_edges() -> None:
    weight = torch.zeros(130, 200)
    weight[0, 0], weight[129, 199], weight[5, 150] = 448.0, -7.0, 3.5
    fp8, scale = to_fp8(weight)
    assert (fp8.shape, fp8.dtype) == ((130, 200), torch.float8_e4m3fn)
    assert scale[0].tolist() == [1.0, 3.5 / 448]
    assert scale[1, 1].item() == 7.0 / 448
    assert fp8[129, 199].float().item() == -448.0
    assert not torch.isnan(fp8.float()).any()  # blocks of zeros


def test_the_demo_is_reproduced_byte_for_byte(demo: dict[str, Tensor], tmp_path: Path) -> None:
    assert export(demo, CONFIG.with_name("tokenizer.json"), tmp_path) == 449
    names = sorted(path.name for path in CONFIG.parent.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == CONFIG.with_name(name).read_bytes(), name
