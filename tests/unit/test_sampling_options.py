"""The sampling options of the command line, read as llama.cpp reads them."""

from __future__ import annotations

import json

import pytest

from gguf_mtp.cli.sampling_options import SamplingArgs
from gguf_mtp.errors import RequestError
from gguf_mtp.params import SamplingParams

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9)
N_VOCAB = 10


def test_nothing_given_changes_nothing() -> None:
    assert SamplingArgs().given() == {}
    assert SamplingArgs().over(DEFAULTS, N_VOCAB) == DEFAULTS


def test_everything_given_is_taken() -> None:
    args = SamplingArgs(
        temp=0.0,
        top_k=3,
        top_p=0.8,
        min_p=0.1,
        typical_p=0.7,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias=["5+1.5", "9-inf"],
        samplers="top-k;temp",
        seed=7,
    )
    assert args.over(DEFAULTS, N_VOCAB) == SamplingParams(
        temperature=0.0,
        top_k=3,
        top_p=0.8,
        min_p=0.1,
        seed=7,
        typical_p=0.7,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias=((5, 1.5), (9, float("-inf"))),
        samplers=("top_k", "temperature"),
    )


def test_a_server_gets_json() -> None:
    args = SamplingArgs(logit_bias=["5+1.5", "9-inf"], samplers="top_k;temp", top_k=3)
    sent = json.loads(json.dumps(args.fields(), allow_nan=False))
    expected = {"logit_bias": [[5, 1.5], [9, False]], "samplers": ["top_k", "temperature"]}
    assert sent == expected | {"top_k": 3}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (SamplingArgs(logit_bias=["5"]), "'5' is not a bias"),
        (SamplingArgs(samplers="top_k;dice"), "'dice'"),
        (SamplingArgs(repeat_penalty=0.0), "repeat_penalty is 0.0"),
    ],
)
def test_what_cannot_be_read_is_named(args: SamplingArgs, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        args.over(DEFAULTS, N_VOCAB)
